"""A worker: one vLLM engine in one Ray actor. Token ids in, token ids out.

A plain class; ``deployments/place.py`` wraps it with ``ray.remote``. Requests, aborts and
deliveries come over channels (``actors/channel.py``), and tokens leave over them; Ray's actor
calls start the worker, connect it and ask for its state. Everything runs on the actor's event
loop and only passes things on to the engine thread, so that aborts, deliveries and health
checks are answered while the engine computes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import ray

from actors.channel import Channel, Listener
from actors.decode import Receiver
from actors.engine import EngineLoop, add_request, build_core
from actors.errors import EngineStartError, WorkerError
from actors.fingerprint import model_files
from actors.link import Link, register
from actors.messages import (
    Abort,
    Again,
    Announce,
    Burden,
    Chunk,
    Delivery,
    Handover,
    Hello,
    Load,
    LoadReport,
    ModelFiles,
    OutputBatch,
    Probe,
    ReceiveFrom,
    Role,
    SenderLost,
    Submit,
    Taken,
    WorkerInfo,
    WorkerSpec,
    WorkerStats,
)
from actors.peers import OnTaken, Peers
from actors.rungs import Rungs
from actors.secret import CHANNEL_PURPOSE, data_plane_key
from actors.steps import StepModel
from actors.transports import make_transports, open_bucket
from actors.versions import versions
from cluster.fake import FAKE
from cluster.model_config import is_path
from kv.ladder import PROBE_SIZES
from kv.transport import Transport, needs_ray

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore

    from kv.bucket import Bucket
    from kv.sweep import Sweeper

logger = logging.getLogger(__name__)
T = TypeVar("T")

SWEEP_S = 0.25
CALL_TIMEOUT_S = 60.0
PROBED_S = 15.0
"""A worker that is being connected measures the ways to its peers for this long, then it serves."""


class Worker:
    """Hosts an engine; prefills for others, decodes from others, or does both for itself.

    Args:
        spec: model, engine options, role.

    Construction returns at once; ``start`` waits for the engine.

    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._node = os.environ.get("HANDOFF_NODE_NAME", os.uname().nodename)
        self._gateways: dict[int, Channel] = {}
        self._clients: dict[str, int] = {}
        self._peers: Peers | None = None
        self._listener: Listener | None = None
        self._files: ModelFiles | None = None
        self._link: Link | None = None
        self._info: WorkerInfo | None = None
        self._loop = asyncio.new_event_loop()  # replaced by the actor's own in start()
        self._engine = EngineLoop(self._build, self)
        self._sweeper: asyncio.Task[None] | None = None
        self._bucket: Bucket | None = None
        self._bucket_sweeper: Sweeper | None = None
        self._role_changes: Counter[str] = Counter()

    # -- life ---------------------------------------------------------------------------------

    async def start(self) -> WorkerInfo:
        """Build the engine (once) and return what the gateway must know about this worker.

        Raises:
            EngineStartError: the engine could not be built; carries vLLM's own message.
            WorkerError: the engine died since.

        """
        if self._info is not None:
            await self.check()
            return self._info
        if self._listener is None:
            self._loop, key = asyncio.get_running_loop(), data_plane_key(CHANNEL_PURPOSE)
            self._peers = Peers(key, self._loop, self._undelivered)
            self._listener = Listener(ray.util.get_node_ip_address(), key, self._accepted)
            self._engine.start()
        await asyncio.to_thread(self._engine.started.wait)
        if self._engine.error is not None:
            raise EngineStartError(f"worker {self._spec.name} on node {self._node}: {self._engine.error}")
        self._sweeper = self._sweeper or asyncio.create_task(self._sweep())
        assert self._info is not None
        return self._info

    async def connect(self, peers: list[WorkerInfo]) -> list[str]:
        """Check that KV caches can be exchanged with these workers, and measure the way to those that decode.

        Returns a line for each of those: which transports there are, and what they cost.

        Raises:
            LayoutMismatch: naming the first field that differs, with both values.

        """
        link = self._link_now()
        for peer in peers:
            link.layout.require_compatible(peer.layout)
            if link.tier is not None:
                link.tier.recall.learn(peer.layout)
        return await self._meet(peers) if self._info_now().role == "prefill" else []

    async def part(self, peer: str) -> None:
        """A worker is gone for good."""
        self._link_now().rungs.forget(peer)

    async def become(self, role: Role, reason: str, peers: list[WorkerInfo]) -> list[str]:
        """Take another role; gateways are told within a moment. What is under way here is finished here.

        Args:
            role: which; that it has already is no error.
            reason: why, in a word, for metrics.
            peers: the other workers; to those that decode the way is measured before a prefill worker says
                that it is one. Returns what ``connect`` does.

        """
        info = self._info_now()
        if info.role == role:
            return []
        ways = await self._meet(peers) if role == "prefill" else []
        self._info = replace(info, role=role)
        self._role_changes[f"{role} {reason}"] += 1
        logger.info("worker %s was %s and is %s now (%s)", info.name, info.role, role, reason)
        return ways

    async def _meet(self, peers: Sequence[WorkerInfo]) -> list[str]:
        """Measure the way to those that decode; return a line for each."""
        link = self._link_now()
        ways = [peer for peer in peers if peer.role == "decode"]
        for peer in ways:
            link.rungs.meet(peer.name, peer.node, peer.transports)
        if ways:  # what takes longer goes on behind our back
            await asyncio.wait(
                [asyncio.create_task(asyncio.to_thread(link.rungs.probe_due))], timeout=PROBED_S
            )
        return [
            f"KV from {self._spec.name} to {peer.name}, {link.rungs.order(peer.name, PROBE_SIZES[1]).reason}"
            for peer in ways
        ]

    async def unproven(self, peers: list[str]) -> dict[str, str]:
        """Return those of the peers that no test block of KV has got to yet, and why; probing goes on."""
        return self._link_now().rungs.unproven(peers)

    async def check(self) -> None:
        """Raise if the engine is not able to serve."""
        if self._engine.error is not None:
            raise WorkerError(f"worker {self._spec.name}: the engine died: {self._engine.error!r}")

    async def versions(self) -> tuple[str, dict[str, str]]:
        """Return this worker's node and the versions there; answers before ``start``."""
        return self._node, versions()

    async def clock(self) -> float:
        """Return this process's monotonic clock, for gateways on other machines."""
        return time.monotonic()

    async def stats(self) -> WorkerStats:
        """Return counters and gauges of this worker."""
        link = self._link_now()
        owned = link.sender.owned_bytes()
        chunks, nbytes = link.rungs.live()
        tally = link.rungs.tally
        engine_requests, blocks = self._engine.held()
        stepped, waiting = self._engine.scheduled()
        return WorkerStats(
            requests=len(self._clients),
            engine_requests=engine_requests,
            kv_blocks_used=blocks,
            sending=len(link.sender.open_requests()),
            receiving=link.receiver.waiting(),
            live_chunks=chunks,
            live_bytes=nbytes,
            orphan_bytes=max(0, nbytes - owned),
            expired_leases=link.sender.expired_leases,
            steps=self._engine.steps,
            taken_chunks={" ".join(key): count for key, count in tally.chunks.copy().items()},
            taken_bytes=dict(tally.nbytes.copy()),
            failed={" ".join(key): count for key, count in tally.failed.copy().items()},
            rates={" ".join(key): rate for key, rate in link.rungs.rates().items()},
            mapped={" ".join(key): rate for key, rate in link.rungs.mapped().items()},
            computed_tokens=link.computed_tokens,
            prefixes=replace(link.prefixes),
            tier={} if link.tier is None else link.tier.counters(),
            stepped=stepped,
            waiting=waiting,
            role=self._info_now().role,
            role_changes=dict(self._role_changes),
        )

    async def burden(self) -> Burden:
        """Return what this worker's role is decided from."""
        info, meter = self._info_now(), self._link_now().meter
        model = meter.model()
        prompts_s, decoding, context = await self._on_engine(partial(_work_of, model))
        return Burden(
            role=info.role,
            node=info.node,
            pid=info.pid,
            prompts_s=prompts_s,
            prompting_s=meter.prompting_s,
            decoding=decoding,
            context=context,
            slots=info.slots,
            kv_tokens=info.kv_blocks * info.layout.block_size,
            step=model,
        )

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; returns False while requests hold blocks."""
        return await self._on_engine(lambda core: bool(core.reset_prefix_cache()))

    async def _on_engine(self, do: Callable[[Any], T]) -> T:
        """Return what a function of the engine core returns between two steps."""
        done: asyncio.Future[T] = self._loop.create_future()

        def act(core: EngineCore) -> None:
            self._loop.call_soon_threadsafe(_answer, done, do(core))

        self._engine.call(act)
        return await asyncio.wait_for(done, CALL_TIMEOUT_S)

    async def stop(self) -> None:
        """Stop the engine and release everything that was published."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.to_thread(self._engine.stop)
        if self._listener is not None and self._peers is not None:
            self._listener.close()
            self._peers.close()
        if self._link is not None:
            self._link.close()
        if self._bucket_sweeper is not None:
            self._bucket_sweeper.close()
        if self._bucket is not None:
            self._bucket.close()

    # -- requests -----------------------------------------------------------------------------

    async def deliver(self, delivery: Delivery) -> float | None:
        """Take a delivery whose ticket only Ray can carry; returns once its payload is done with.

        Returns the seconds that its fetch took, None if there was none.
        """
        self._learn(delivery)
        done: asyncio.Future[float | None] = self._loop.create_future()

        def taken(seconds: float | None) -> None:
            self._loop.call_soon_threadsafe(_answer, done, seconds)

        self._link_now().receiver.deliver(delivery, taken)
        return await done  # bounded by the receiver's deadlines

    async def again(self, asked: Again) -> Chunk:
        """Publish a chunk over another rung, because the worker that asks could not fetch it.

        Raises:
            TransferError: it is not published any more, or no rung is left.

        """
        return await asyncio.to_thread(self._link_now().sender.again, asked)

    async def probe(self, probe: Probe, timeout_s: float) -> float:
        """Fetch what a peer published to measure a rung; return the seconds it took."""
        return await asyncio.to_thread(self._link_now().rungs.answer, probe, timeout_s)

    def _accepted(self, channel: Channel) -> None:
        channel.open(partial(self._take, channel), partial(self._gone, channel))

    def _take(self, channel: Channel, message: object) -> None:
        """Take a message of a gateway or of another worker."""
        match message:
            case Hello(client):
                self._gateways[client] = channel
            case Submit(frame, handover):
                self._submit(frame, handover)
            case Abort(request_ids):
                self._abort(request_ids)
            case SenderLost(request_ids):
                for request_id in request_ids:
                    self._link_now().receiver.sender_lost(request_id)
            case Announce(number, delivery):
                self._learn(delivery)
                self._link_now().receiver.deliver(delivery, lambda took: channel.send(Taken(number, took)))
            case _:
                logger.warning("a message of an unknown kind came: %s", type(message).__name__)

    def _learn(self, delivery: Delivery) -> None:
        """Who hands KV over also keeps it, in its own layout; a worker that was restarted sees it here."""
        if isinstance(delivery, Chunk) and (tier := self._link_now().tier) is not None:
            tier.recall.learn(delivery.header.layout)

    def _gone(self, channel: Channel, reason: str) -> None:
        """A channel ended; if it was a gateway's, so do the gateway's requests."""
        for client in [client for client, theirs in self._gateways.items() if theirs is channel]:
            logger.warning("worker %s: a gateway is gone: %s", self._spec.name, reason)
            del self._gateways[client]
            self._abort([rid for rid, owner in self._clients.items() if owner == client])

    def _submit(self, frame: tuple[bytes, ...], handover: Handover | None) -> None:
        from actors.connector import params_of
        from actors.frames import decode_request

        request = decode_request(frame)
        request_id, link = request.request_id, self._link_now()
        self._clients[request_id] = request.client_index
        link.marks.open(request_id)
        link.marks.note(request_id, "accepted")
        if handover is not None:
            request.sampling_params.extra_args = {
                **(request.sampling_params.extra_args or {}),
                "kv_transfer_params": params_of(handover),
            }
        if isinstance(handover, ReceiveFrom):
            failed = link.receiver.expect(request_id, handover.timeout_s)
            if failed is not None:
                self._handover_failed(request_id, failed)
                return

        def add(core: EngineCore) -> None:
            try:
                add_request(core, request)
            except Exception as error:  # of this request, and no reason for the engine to die
                self._handover_failed(request_id, f"the engine refused it: {error}")

        self._engine.call(add)

    def _abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests and free their blocks. Unknown ids are ignored."""
        for request_id in request_ids:
            self._forget(request_id)
        self._engine.call(lambda core: core.abort_requests(list(request_ids)))
        link = self._link_now()
        link.sender.abandon(request_ids)  # of one that is prefilled, chunks may still wait for decode
        for request_id in request_ids:  # one that the engine never saw may have chunks waiting
            self._engine.call(partial(_close, link.receiver, request_id))

    # -- engine thread ------------------------------------------------------------------------

    def produced(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """See ``engine.Outputs``."""
        from actors.frames import encode_outputs

        link = self._link_now()
        for client, batch in outputs.items():
            marks, handed, recalled = {}, {}, {}
            for output in batch.outputs:
                if taken := link.marks.close(output.request_id):
                    marks[output.request_id] = (*taken, ("output", time.monotonic()))
                    if (how := link.receiver.handed(output.request_id)) is not None:
                        handed[output.request_id] = how
                    if link.tier and (loaded := link.tier.recall.recalled(output.request_id)) is not None:
                        recalled[output.request_id] = loaded
                if output.finished:
                    self._loop.call_soon_threadsafe(self._forget, output.request_id)
            if batch.outputs:
                frame = encode_outputs(batch)
                self._put(client, OutputBatch(frame, marks=marks, handed=handed, recalled=recalled))

    def stepped(self, unfinished: int) -> None:
        """See ``engine.Outputs``."""
        self._link_now().meter.completed(unfinished)

    def died(self, error: BaseException) -> None:
        """See ``engine.Outputs``: an engine cannot be mended, so the process ends and Ray starts another."""
        logging.shutdown()
        os._exit(1)

    def _rank_died(self) -> None:
        """On a thread of the executor."""
        self.died(WorkerError("one of the engine's ranks died"))

    def _build(self) -> Any:
        from vllm.transformers_utils.repo_utils import get_model_path

        assert self._listener is not None
        assert self._peers is not None
        path = Path(self._spec.model)
        if not path.is_dir() and is_path(self._spec.model):
            raise EngineStartError(
                f"model: {path} is no folder on this node; copy the model there, or set `model` of its "
                f"node group"
            )
        path = path if path.is_dir() else Path(get_model_path(self._spec.model))
        self._files = model_files(path, weights_needed=FAKE not in self._spec.engine)
        self._bucket = open_bucket(self._spec)
        if self._bucket is not None:
            from kv.sweep import Sweeper

            self._bucket_sweeper = Sweeper(self._bucket)
        link = Link(
            self._spec.name,
            self._files.digest,
            Rungs(self._transports(), self._node, self._peers.probe, self._spec.mapped),
            self._post,
            self._peers.again,
            self._engine.wake,
            self._handover_failed,
            self._bucket if self._spec.tier else None,
        )
        engine_id = f"{self._spec.name}-{os.getpid()}"
        register(engine_id, link)
        core = build_core(str(path), dict(self._spec.engine), engine_id, self._rank_died)
        self._link = link
        self._info = WorkerInfo(
            name=self._spec.name,
            role=self._spec.role,
            node=self._node,
            pid=os.getpid(),
            model_files=self._files,
            layout=link.layout,
            max_model_len=core.vllm_config.model_config.max_model_len,
            kv_blocks=core.vllm_config.cache_config.num_gpu_blocks or 0,
            transports=link.rungs.names,
            address=self._listener.address,
            slots=core.vllm_config.scheduler_config.max_num_seqs,
            chunk=core.vllm_config.scheduler_config.max_num_batched_tokens,
        )
        return core

    # -- helpers ------------------------------------------------------------------------------

    def _transports(self) -> Mapping[str, Transport]:
        return make_transports(self._spec, self._bucket)

    def _handover_failed(self, request_id: str, reason: str) -> None:
        """Any thread: end the request here and tell its gateway, which decides what to try next."""

        def give_up() -> None:
            client = self._clients.get(request_id)
            self._forget(request_id)
            if client is not None:
                self._put(client, OutputBatch((), failures={request_id: reason}))

        self._engine.call(lambda core: core.abort_requests([request_id]))
        self._engine.call(partial(_close, self._link_now().receiver, request_id))
        self._loop.call_soon_threadsafe(give_up)

    def _post(self, peer: str, delivery: Delivery, taken: OnTaken) -> None:
        """Any thread: send a delivery to another worker."""
        assert self._peers is not None
        by_ray = isinstance(delivery, Chunk) and needs_ray(delivery.ticket)
        send = self._peers.call if by_ray else self._peers.post
        send(peer, delivery, taken)

    def _undelivered(self, delivery: Delivery, reason: str) -> None:
        """Tell the gateway, which need not wait for the decode worker to find out."""
        request_id = delivery.header.request_id if isinstance(delivery, Chunk) else delivery.request_id
        # The request may have left this worker, and with it the number of its gateway.
        for channel in self._gateways.values():
            channel.send(OutputBatch((), failures={request_id: reason}))

    def _put(self, client: int, batch: OutputBatch) -> None:
        """Any thread: send a gateway what there is for it."""
        if (channel := self._gateways.get(client)) is not None:
            channel.send(batch)

    def _forget(self, request_id: str) -> None:
        self._clients.pop(request_id, None)
        self._link_now().marks.close(request_id)

    def _report(self, core: EngineCore) -> None:
        """On the engine thread: tell each gateway what steps take, and what the others have here."""
        link, loads = self._link_now(), dict[int, Load]()
        for request in core.scheduler.requests.values():
            loads[request.client_index] = _with(loads.get(request.client_index, Load()), request)
        model, rates = link.meter.model(), dict[str, float]()
        for (peer, _), rate in link.rungs.rates().items():
            rates[peer] = max(rates.get(peer, 0.0), rate)
        for client in list(self._gateways):
            others = [load for owner, load in loads.items() if owner != client]
            total = Load(
                sum(o.tokens for o in others), sum(o.running for o in others), sum(o.context for o in others)
            )
            self._put(client, OutputBatch((), load=LoadReport(model, total, rates, self._info_now().role)))

    def _link_now(self) -> Link:
        if self._link is None:
            raise WorkerError(f"worker {self._spec.name} has not started")
        return self._link

    def _info_now(self) -> WorkerInfo:
        if self._info is None:
            raise WorkerError(f"worker {self._spec.name} has not started")
        return self._info

    async def _sweep(self) -> None:
        probing: asyncio.Task[None] | None = None
        told: object = None
        while True:
            await asyncio.sleep(SWEEP_S)
            link = self._link_now()
            link.receiver.sweep()
            link.sender.sweep()
            role = self._info_now().role
            now = (self._engine.steps, len(self._gateways), link.rungs.rates(), role)
            if self._gateways and now != told:
                told = now
                self._engine.call(self._report)
            if link.tier is not None:
                link.tier.recall.sweep()
            if probing is None or probing.done():
                probing = asyncio.create_task(asyncio.to_thread(link.rungs.probe_due))


def _with(load: Load, request: Any) -> Load:
    """A gateway's load with one more request, as vLLM's scheduler has it."""
    from actors.connector import PARAM

    arrives = isinstance((request.kv_transfer_params or {}).get(PARAM), ReceiveFrom)
    left = 0 if arrives else max(0, request.num_prompt_tokens - request.num_computed_tokens)
    return Load(load.tokens + left, load.running + 1, load.context + request.num_tokens)


def _work_of(model: StepModel, core: Any) -> tuple[float, int, int]:
    """Return what the prompts that wait will take, the sequences that decode, and their context."""
    prompts_s, decoding, context = 0.0, 0, 0
    for request in core.scheduler.requests.values():
        if left := _with(Load(), request).tokens:
            prompts_s += model.prefill_s(left, request.num_computed_tokens)
        elif request.status.name == "RUNNING":
            decoding, context = decoding + 1, context + request.num_tokens
    return prompts_s, decoding, context


def _answer(done: asyncio.Future[T], value: T) -> None:
    if not done.done():  # whoever asked may be gone
        done.set_result(value)


def _close(receiver: Receiver, request_id: str, core: object) -> None:
    receiver.close(request_id)


_ENGINE_ENV: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",  # the receiver's own threads block, not the event loop
    # The engine runs in a thread of its own. glibc gives threads heaps that it hands back to the kernel after
    # every step and has to fault in again: 9,000 page faults, 5 to 10 ms, in a prefill of 2048 tokens.
    "MALLOC_ARENA_MAX": "1",
}


def engine_env(engine: Mapping[str, Any]) -> dict[str, str]:
    """Environment that a worker's process starts with, given vLLM's engine options.

    vLLM compiles some small functions (of log probabilities, top-k, the embedding of several ranks) at their
    first use, also when it is told not to compile: for 5 to 20 s the worker's requests would stand still.
    """
    eager = {"TORCHDYNAMO_DISABLE": "1"} if engine.get("enforce_eager") else {}
    return {**_ENGINE_ENV, **eager}
