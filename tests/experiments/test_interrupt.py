import signal
import subprocess
import sys
from pathlib import Path

# Cleans up for half a second, as an experiment does that ends its processes.
PROGRAM = """
import pathlib, sys, time
from handoff.interrupt import end_in_order
end_in_order()
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    time.sleep(0.5)
    pathlib.Path(sys.argv[1]).write_text("clean")
"""


def test_a_second_signal_does_not_break_off_the_clean_up(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "end")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert (tmp_path / "end").read_text() == "clean"
