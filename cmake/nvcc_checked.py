"""Run nvcc as CMake's compiler launcher and check what ptxas says.

The compiler's messages go to ``<object>.log`` beside the object file (registers, spills and
shared memory per kernel, from ``-Xptxas -v``); only warnings and errors are shown. Notes C75xx of
ptxas mean that it serialised ``wgmma`` or ignored ``setmaxnreg``: right results at a fraction of
the speed, so they fail the build. So do, with ``--local-memory=BYTES`` before the compiler, kernels
that use more local memory, for spilled registers or arrays that are indexed at run time.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

# In brackets: names of kernels hold hashes of their file's path.
SLOW_CODE = re.compile(r"\(C75\d\d\)|setmaxnreg.*ignored")
LOCAL_MEMORY = re.compile(r"(\d+) bytes (?:stack frame|spill stores|spill loads)")
OPTION = "--local-memory="
ROUTINE = re.compile(
    r"^ptxas info|^\s+\d+ bytes stack frame|^\s*Function properties|^\s*Compiling entry|^\s*$"
)


def main(command: list[str]) -> int:
    """Run `command`, log its messages and return its exit status, or 1 for slow code."""
    most_local = math.inf
    if command[0].startswith(OPTION):
        most_local = int(command[0].removeprefix(OPTION))
        command = command[1:]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    messages = result.stderr.splitlines()
    if "-o" in command:
        output = Path(command[command.index("-o") + 1])
        output.with_name(output.name + ".log").write_text(result.stderr)
    slow = [
        line
        for line in messages
        if SLOW_CODE.search(line)
        or max(map(int, LOCAL_MEMORY.findall(line)), default=0) > most_local
    ]
    for line in messages:
        if line in slow or not ROUTINE.search(line):
            print(line, file=sys.stderr)
    if result.returncode == 0 and slow:
        print("error: ptxas serialised or slowed a kernel, see above", file=sys.stderr)
        if "-o" in command:
            output.unlink(missing_ok=True)
        return 1
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
