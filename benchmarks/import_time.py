"""What `import dapcal` costs beyond `import torch`, in fresh processes.

Run: python benchmarks/import_time.py
"""

from __future__ import annotations

import subprocess
import sys

CODE = """
import time, torch
start = time.perf_counter()
import dapcal
print(time.perf_counter() - start)
"""


def main() -> None:
    times = [float(subprocess.check_output([sys.executable, "-c", CODE])) for _ in range(7)]
    print(f"import dapcal after import torch: median {sorted(times)[3]:.3f} s of 7, from {min(times):.3f}")


if __name__ == "__main__":
    main()
