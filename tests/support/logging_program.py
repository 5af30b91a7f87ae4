"""A program that writes what Megatron-LM writes, and then does what its arguments say."""

from __future__ import annotations

import os
import subprocess
import sys
import time

MARK = "a-child-that-must-not-stay"


def step(number: int, seconds: float, batch: str = "") -> None:
    print(
        f" [2026-08-22 15:22:22.123456] iteration {number:8d}/{1000:8d} | consumed samples: {number:12d} |"
        f" elapsed time per iteration (ms): {seconds * 1000:.1f} |{batch} lm loss: {3.0:.6E} |"
    )


def main(what: str, count: int, pids: str) -> None:
    child = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)", MARK]
    family = [subprocess.Popen(child), subprocess.Popen(child, start_new_session=True)] if pids else []
    if pids:
        with open(pids, "w") as stream:  # noqa: PTH123
            stream.write(" ".join(str(process) for process in [os.getpid(), *(process.pid for process in family)]))
    print(
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 2048.0 | reserved: 1 |"
        " max reserved: 4096.0"
    )
    for number in range(1, count + 1):
        step(number, 9.0 if number < 3 else 2.0 + number / 100, " global batch size:     3 |" * (what == "other-batch"))
    match what:
        case "hang":
            time.sleep(600)
        case "crash":
            raise ValueError("the data ran dry")
        case "oom":
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", file=sys.stderr)
            print("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", file=sys.stderr)
            raise SystemExit(1)
        case "killed":
            os.kill(os.getpid(), 9)
        case "nameless":
            os.kill(os.getpid(), 40)
        case "endless":
            number = count
            while True:
                number += 1
                step(number, 2.0)
                time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
