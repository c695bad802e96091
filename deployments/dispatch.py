"""A request's way through the workers: routed, split, submitted, put together again, retried.

One ``Flight`` per engine request. Whatever goes wrong on the way (a worker dies, KV does not
come, a chunk is corrupt) ends in ``_retry``, the only place that tries again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason

from actors.frames import decode_outputs, encode_request
from actors.messages import Handed, OutputBatch, Recalled, ReceiveFrom, SendTo, WorkerStats
from deployments import split
from deployments.budget import Budget
from deployments.errors import RequestLost
from deployments.ledger import Record
from deployments.planner import Plan, Planner, facts_of
from deployments.refusals import NoWorker, Overloaded
from deployments.router import Policy, Route
from deployments.snapshot import NO_SLO, Slo
from deployments.split import Mode, Split
from deployments.worker_client import WorkerClient

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
HANDOVER_TIMEOUT_S = 120.0
LEASE_SLACK_S = 30.0
"""What prefill has published outlives the time in which decode must have it by this."""


@dataclass(slots=True)
class Flight:
    """An engine request on its way.

    Attributes:
        request: as the input processor made it.
        record: its ledger.
        plan: where it is now, and why.
        attempt: which try this is, from 0; part of the id that the workers see.
        emitted: output tokens that have been passed on.
        held: outputs of decode that arrived before the first token did.
        paid: prompt tokens of this try that were taken from the budget.
        repeated: of what has been passed on, what an attempt that started anew must still produce again.
        engine_id: the request id that the workers see, of the present try.

    """

    request: EngineCoreRequest
    record: Record
    plan: Plan
    attempt: int = 0
    emitted: list[int] = field(default_factory=list)
    held: list[EngineCoreOutput] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    prefilling: bool = False
    paid: int = 0
    engine_id: str = ""

    @property
    def route(self) -> Route:
        """Where it is now."""
        return self.plan.route

    @property
    def divided(self) -> bool:
        """Whether two workers are at it."""
        return self.route.prefill != self.route.decode


class Dispatcher:
    """Sends requests to workers and gathers their outputs.

    Args:
        deliver: takes outputs in order; returns ids of requests that are complete (a stop
            string was found) and must be aborted.
        fail: told (request id, error) when a request is lost for good.
        seeded_alone: longest prompt that one engine samples with a seed by itself. vLLM's CPU
            engine dies of a seeded prompt that it computes in several steps; divided requests
            are safe, because decode computes one prompt token.
        budget: of prompt tokens that decode workers may compute because a handover failed; None: no limit.
        planner: decides where requests go; by default adaptively.

    """

    def __init__(
        self,
        deliver: Callable[[list[EngineCoreOutput]], list[str]],
        fail: Callable[[str, Exception], None],
        seeded_alone: int | None = None,
        budget: Budget | None = None,
        planner: Planner | None = None,
    ) -> None:
        self._deliver, self._fail, self._seeded_alone = deliver, fail, seeded_alone
        self.budget, self.planner = budget, planner or Planner()
        self._workers: dict[str, WorkerClient] = {}
        self._flights: dict[str, Flight] = {}

    def workers(self) -> list[WorkerClient]:
        """Return all workers, alive or not, without those that have been removed."""
        return [worker for worker in self._workers.values() if not worker.closed]

    def add_worker(self, worker: WorkerClient) -> None:
        """Make a connected worker available to the router."""
        self._workers[worker.info.name] = worker
        self.planner.fleet.add(worker.info)
        worker.on_back = lambda back: self.planner.fleet.came(back.info)

    def leaves(self, name: str, leaving: bool) -> None:
        """A worker is to get no more requests, or gets some again."""
        self.planner.fleet.leaves(name, leaving)

    def remove_worker(self, name: str) -> None:
        """Forget a worker that is given up. Requests that it still has are tried elsewhere."""
        worker = self._workers[name]  # it stays in the table, where flights look up who computed their prompt
        if not worker.closed:
            worker.close()
            self.on_lost(worker, "it was given up")

    def require_worker(self) -> None:
        """Raise ``NoWorker`` if none is alive."""
        if not any(worker.alive for worker in self._workers.values()):
            raise NoWorker(f"none of the {len(self.workers())} workers is alive; see `handoff status`")

    async def describe_workers(self) -> list[dict[str, object]]:
        """Return each worker's load as seen from here, and its own counters."""
        workers = self.workers()
        stats = await asyncio.gather(*(w.stats() for w in workers), return_exceptions=True)
        return [
            {
                "name": w.info.name,
                "role": w.info.role,
                "alive": w.alive,
                "node": w.info.node,
                "pid": w.info.pid,
                **self.planner.fleet.describe(w.info.name),
                **(asdict(own) if isinstance(own, WorkerStats) else {}),
            }
            for w, own in zip(workers, stats, strict=True)
        ]

    async def reset_prefix_caches(self) -> bool:
        """Forget cached prefixes on every worker; return whether all of them could."""
        done = await asyncio.gather(*(w.reset_prefix_cache() for w in self.workers()))
        return all(done)

    def submit(
        self,
        request: EngineCoreRequest,
        record: Record,
        slo: Slo = NO_SLO,
        policy: Policy | None = None,
        admitted: bool = False,
    ) -> None:
        """Route a request and send it off, unless its objectives cannot be met (and it is not ``admitted``).

        Raises:
            NoWorker: no worker is alive.
            Unmeetable: its objectives cannot be met.
            VLLMValidationError: it cannot be divided, and would end the engine that ran it alone.

        """
        chosen = split.choose(request)
        alone_is_unsafe = self._unsafe(request, []) is not None
        flight = Flight(request, record, self.planner.plan(request, chosen, alone_is_unsafe, slo, policy))
        if not flight.divided and (why := self._unsafe(request, [])) is not None:
            raise VLLMValidationError(
                f"{why}. It is not divided because {flight.route.reason}.", parameter="seed"
            )
        if not admitted:
            self.planner.admit(flight.plan)
        record.note("routed")
        self._launch(flight)

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests and free their blocks on every worker that has them."""
        for request_id in request_ids:
            if (flight := self._flights.get(request_id)) is not None:
                self._abandon(flight)

    def on_batch(self, worker: WorkerClient, batch: OutputBatch) -> None:
        """Take what a worker sent."""
        received = time.monotonic()
        if batch.load is not None:
            self.planner.fleet.report(worker.info.name, batch.load)
            worker.info = replace(worker.info, role=batch.load.role or worker.info.role)
        ready: list[EngineCoreOutput] = []
        if batch.frame:
            for output in decode_outputs(batch.frame).outputs:
                if (flight := self._flight(output.request_id)) is not None:
                    marks = batch.marks.get(output.request_id, ())
                    handed = batch.handed.get(output.request_id)
                    if (recalled := batch.recalled.get(output.request_id)) is not None:
                        self._note_recalled(flight, worker, recalled)
                    ready.extend(self._advance(flight, worker, output, marks, handed, received))
        if ready:
            self.abort(self._deliver(ready))
        for engine_id, reason in batch.failures.items():
            if (flight := self._flight(engine_id)) is not None:
                self._retry(flight, reason)

    def on_lost(self, worker: WorkerClient, reason: str) -> None:
        """A worker is gone: try its requests elsewhere.

        Of those that it has prefilled, the decode worker knows whether all KV has been announced; nobody
        else would tell it that the rest will not come.
        """
        name = worker.info.name
        self.planner.fleet.lost(name)
        handed_over = defaultdict[str, list[str]](list)
        for flight in list(self._flights.values()):
            if flight.route.decode == name or (flight.route.prefill == name and flight.prefilling):
                self._retry(flight, f"worker {name} was lost: {reason}")
            elif flight.route.prefill == name:
                handed_over[flight.route.decode].append(flight.engine_id)
        for decode, engine_ids in handed_over.items():
            self._workers[decode].sender_lost(engine_ids)

    def _flight(self, engine_id: str) -> Flight | None:
        """Return the flight that a worker's id belongs to, unless that attempt is over."""
        flight = self._flights.get(engine_id.rpartition(".")[0])
        return flight if flight is not None and flight.engine_id == engine_id else None

    # -- one request ----------------------------------------------------------------------------

    def _launch(self, flight: Flight) -> None:
        self._flights[flight.request.request_id] = flight
        flight.engine_id = f"{flight.request.request_id}.{flight.attempt}"
        where = flight.route
        prefill, decode = self._workers[where.prefill], self._workers[where.decode]
        flight.prefilling = True
        self.planner.sent(flight.engine_id, flight.plan)
        flight.record.facts.update(
            facts_of(flight.plan),
            prefill_worker=where.prefill,
            decode_worker=where.decode,
            prefill_node=prefill.info.node,
            decode_node=decode.info.node,
            transport=None,
            tier_worker=None,
            tier_tokens=0,
            attempts=flight.attempt + 1,
        )
        whole = split.continued(flight.request, [] if flight.repeated else flight.emitted)
        if not flight.divided:
            self._send(flight, prefill, whole, None)
            return
        assert whole.prompt_token_ids is not None
        first_token = where.mode is Mode.FIRST_TOKEN
        receive = ReceiveFrom(where.prefill, len(whole.prompt_token_ids), first_token, HANDOVER_TIMEOUT_S)
        send = SendTo(where.decode, HANDOVER_TIMEOUT_S + LEASE_SLACK_S)
        self._send(flight, prefill, split.prefill_part(whole, where.mode), send)
        self._send(flight, decode, split.decode_part(whole, where.mode), receive)

    def _send(
        self,
        flight: Flight,
        worker: WorkerClient,
        part: EngineCoreRequest,
        handover: SendTo | ReceiveFrom | None,
    ) -> None:
        engine_id = flight.engine_id
        part.request_id, part.client_index = engine_id, worker.client
        worker.submit(encode_request(part), handover)

    def _advance(
        self,
        flight: Flight,
        worker: WorkerClient,
        output: EngineCoreOutput,
        marks: tuple[tuple[str, float], ...],
        handed: Handed | None,
        received: float,
    ) -> list[EngineCoreOutput]:
        """Take one output of one worker; return what can be passed on, in order."""
        from_prefill = worker.info.name == flight.route.prefill and flight.prefilling
        role = "prefill" if from_prefill else "decode"
        if marks:
            peer = self._workers[flight.route.prefill].clock_offset
            flight.record.note_worker(role, marks, worker.clock_offset, peer)
            flight.record.note("first_token" if from_prefill else "decode_token", received)
            if handed is not None:
                flight.record.facts.update(
                    kv_bytes=handed.nbytes,
                    transport="+".join(handed.rungs) or "cached",
                    transport_reason=handed.reason or "decode had all of the prompt's KV cached",
                )
        if from_prefill:
            self._end_prefill(flight, output)
            if not flight.divided:
                return self._pass_on(flight, [output])
            return self._first_token(flight, output)
        if flight.prefilling and flight.route.mode is Mode.FIRST_TOKEN:
            flight.held.append(output)
            return []
        return self._pass_on(flight, [output])

    def _note_recalled(self, flight: Flight, worker: WorkerClient, recalled: Recalled) -> None:
        """A worker loaded KV from the bucket's tier: on the record it goes, and back into the budget."""
        flight.record.facts.update(
            tier_worker=worker.info.name,
            tier_tokens=recalled.tokens,
            tier_bytes=recalled.nbytes,
            tier_reason=recalled.reason,
        )
        if flight.paid:
            assert self.budget is not None
            self.budget.refund(min(flight.paid, recalled.tokens))
            flight.paid = 0

    def _first_token(self, flight: Flight, output: EngineCoreOutput) -> list[EngineCoreOutput]:
        """Take the only output of a divided request's prefill."""
        if output.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
            self._retry(flight, f"prefill ended with {output.finish_reason}")
            return []
        if flight.route.mode is Mode.DECODE_SAMPLES:
            return []
        if output.finish_reason is FinishReason.LENGTH:  # of the one token it was asked for
            output.finish_reason = None
        self._add_events(flight, output, "prefill")
        held, flight.held = flight.held, []
        if output.finish_reason is not None:  # decode still waits for KV that it will not need
            self._workers[flight.route.decode].abort([flight.engine_id])
        return self._pass_on(flight, [output, *held])

    def _pass_on(self, flight: Flight, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        if flight.repeated:
            outputs = self._repeat(flight, outputs)
        for output in outputs:
            self.planner.passed(flight.engine_id, len(output.new_token_ids))
            if not flight.emitted:
                self._add_events(flight, output, "decode" if flight.divided else "prefill")
            output.request_id = flight.request.request_id
            flight.emitted.extend(output.new_token_ids)
            if output.finish_reason is not None:
                self._drop(flight, whole=True)
        return outputs

    def _repeat(self, flight: Flight, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Of an attempt that started anew, drop what has been passed on before; return what is new."""
        for position, output in enumerate(outputs):
            if not flight.repeated:
                return outputs[position:]
            tokens = output.new_token_ids
            if tokens != flight.repeated[: len(tokens)] or output.finish_reason is not None:
                self._abandon(flight)
                reason = flight.record.facts.get("failure")
                self._fail(
                    flight.request.request_id,
                    RequestLost(
                        f"{reason}; computed again, other tokens came: it cannot be continued elsewhere"
                    ),
                )
                return []
            del flight.repeated[: len(tokens)]
        return []

    def _add_events(self, flight: Flight, output: EngineCoreOutput, role: str) -> None:
        """Give vLLM's statistics the request's queue times, on this process's clock."""
        moments = flight.record.moments
        if output.events is None and f"{role}.scheduled" in moments:
            output.events = [
                EngineCoreEvent(EngineCoreEventType.QUEUED, moments[f"{role}.accepted"]),
                EngineCoreEvent(EngineCoreEventType.SCHEDULED, moments[f"{role}.scheduled"]),
            ]

    def _end_prefill(self, flight: Flight, output: EngineCoreOutput) -> None:
        flight.prefilling = False
        stats = output.prefill_stats
        self.planner.prefilled(flight.engine_id, None if stats is None else stats.num_local_cached_tokens)

    def _abandon(self, flight: Flight) -> None:
        self._drop(flight)
        for name in {flight.route.prefill, flight.route.decode}:
            self._workers[name].abort([flight.engine_id])

    def _drop(self, flight: Flight, whole: bool = False) -> None:
        if self._flights.pop(flight.request.request_id, None) is not None:
            self.planner.ended(flight.engine_id, whole)

    # -- the one retry policy ---------------------------------------------------------------------

    def _retry(self, flight: Flight, reason: str) -> None:
        """Try again, undivided, from the tokens that have been passed on; or give up and say why."""
        self._abandon(flight)
        request_id = flight.request.request_id
        flight.record.facts["failure"] = reason
        if flight.attempt + 1 >= MAX_ATTEMPTS:
            self._fail(request_id, RequestLost(f"request {request_id} failed {MAX_ATTEMPTS} times: {reason}"))
            return
        if flight.emitted and (split.choose(flight.request).mode is not Mode.FIRST_TOKEN):
            if not split.repeatable(flight.request.params):
                self._fail(
                    request_id, RequestLost(f"{reason}; its sampling state cannot be continued elsewhere")
                )
                return
            flight.repeated = list(flight.emitted)
        flight.attempt += 1
        try:
            flight.plan = self._alone(flight, f"after a failure: {reason}")
        except NoWorker as error:
            self._fail(request_id, error)
            return
        if (wait_s := self._over_budget(flight)) > 0:
            self._fail(
                request_id,
                Overloaded(
                    f"{reason}; computing the prompt on {flight.route.decode} instead would slow the "
                    f"requests that it decodes; try again in {wait_s:.1f} s",
                    wait_s,
                ),
            )
            return
        said = [] if flight.repeated else flight.emitted
        if (why := self._unsafe(flight.request, said)) is not None:
            self._fail(request_id, RequestLost(f"{reason}; {why}"))
            return
        logger.warning("request %s: %s; trying again on %s", request_id, reason, flight.route.decode)
        self._launch(flight)

    def _alone(self, flight: Flight, reason: str) -> Plan:
        """Where to compute everything: the decode worker that it was routed to, unless that one is lost."""
        whole = split.continued(flight.request, [] if flight.repeated else flight.emitted)
        plan = self.planner.plan(whole, Split(Mode.UNDIVIDED, reason))
        name, cause = flight.route.decode, "retry"
        worker = self._workers[name]
        if worker.alive and worker.info.role == "decode":
            return replace(plan, route=Route(name, name, Mode.UNDIVIDED, reason, cause))
        return replace(plan, route=plan.route._replace(cause=cause))

    def _over_budget(self, flight: Flight) -> float:
        """Take the prompt from the budget; return how long to wait if there is none left."""
        flight.paid = 0
        if self.budget is None or self._workers[flight.route.decode].info.role != "decode":
            return 0.0
        tokens = len(flight.request.prompt_token_ids or ()) + len(flight.emitted)
        if (wait_s := self.budget.spend(tokens)) == 0:
            flight.paid = tokens
        return wait_s

    def _unsafe(self, request: EngineCoreRequest, emitted: list[int]) -> str | None:
        """Say why a request must not run undivided, if it must not."""
        params, limit = request.sampling_params, self._seeded_alone
        prompt = len(request.prompt_token_ids or ()) + len(emitted)
        if limit is None or prompt <= limit or params is None or not split.seeded(params):
            return None
        return (
            f"a `seed` with a prompt of {prompt} tokens cannot run on one CPU engine, which takes {limit} at "
            f"these settings: leave the seed out, or raise max_num_batched_tokens"
        )
