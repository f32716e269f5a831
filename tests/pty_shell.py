"""Stands between a pty and the program `tqgguf`, as a shell with job control does: the program in the foreground, the
shell after it has stopped. It says how the terminal is then, lets a stopped program go on, and says how it ended.

Called with the program's arguments.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import time


def main() -> None:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    before = termios.tcgetattr(0)
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        print(f"child {os.getpid()}", flush=True)
        os.execv(sys.executable, [sys.executable, "-m", "tqgguf.cli.main", *sys.argv[1:]])
    while True:
        _, ended = os.waitpid(child, os.WUNTRACED)
        os.tcsetpgrp(0, os.getpgrp())
        print(f"\nterminal {'restored' if termios.tcgetattr(0) == before else 'CHANGED'}", flush=True)
        if not os.WIFSTOPPED(ended):
            print(f"status {os.waitstatus_to_exitcode(ended)}", flush=True)
            time.sleep(0.1)  # until that is read
            return
        print("stopped", flush=True)
        os.tcsetpgrp(0, child)
        os.kill(child, signal.SIGCONT)


if __name__ == "__main__":
    main()
