"""A follower that does as its orders say, in place of tpllama.follow: `python -m stand_in`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from tpllama.parallel.launch import die_with_leader, report_failure

orders = json.loads(sys.stdin.readline())
rank = orders["place"]["rank"]
deed = orders["deeds"].get(str(rank), "wait")
if deed != "ignore the leader":
    die_with_leader()
time.sleep(orders.get("delay_s", 0))
match deed:
    case "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    case "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    case "exit":
        sys.exit(3)
    case "fail":
        print("a library's chatter", flush=True)
        report_failure(f"OSError: disk of rank {rank}", user_error=False)
        sys.exit(1)
    case "refuse":
        report_failure("found a bad file, expected a good one", user_error=True)
        sys.exit(2)
    case "lose another":
        report_failure(None, user_error=False)
        sys.exit(1)
time.sleep(60)
