"""Run every benchmark once at a tiny size: all must run, and deliver no wrong row.

No times are judged here: machines that run tests are shared and noisy.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    """Run ``bench_*.py --smoke`` one after the other; end at the first that fails."""
    for script in sorted(HERE.glob("bench_*.py")):
        start = time.perf_counter()
        command = [sys.executable, str(script), "--smoke"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        print(f"{script.name}: exit {done.returncode}, {time.perf_counter() - start:.1f} s")
        if done.returncode:
            print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    main()
