"""The program of a follower that the leader started: take orders, load, run in lockstep until told to stop."""

from __future__ import annotations

import json
import os
import sys

from tpllama.config import EngineConfig, UserError
from tpllama.parallel.launch import die_with_leader, report_failure
from tpllama.parallel.place import Place
from tpllama.quiet import quiet_libraries


def main() -> int:
    orders = json.loads(sys.stdin.readline())
    die_with_leader()
    is_debug = bool(orders["debug"])
    if not is_debug:
        quiet_libraries()
    try:
        _follow(EngineConfig(**orders["engine"]), Place(**orders["place"]))
    except UserError as error:
        report_failure(str(error), user_error=True)
        return 2
    except Exception as error:  # noqa: BLE001 - a rank's boundary: whatever it is, the leader reports it
        return _fail(error, is_debug)
    return 0


def _follow(engine: EngineConfig, place: Place) -> None:
    from tpllama.checkpoint.open import open_for
    from tpllama.engine.lockstep import follow
    from tpllama.start import draw_blueprint, start_rank

    checkpoint = open_for(engine)
    runner = start_rank(draw_blueprint(engine, checkpoint), checkpoint, place)
    del checkpoint  # nothing more is read: its files are closed
    follow(runner, runner.ranks)


def _fail(error: Exception, is_debug: bool) -> int:
    from tpllama.parallel.collectives import RankLost

    if is_debug:
        import traceback

        traceback.print_exc()
    # A rank that only lost another has nothing to say about why.
    is_loss = isinstance(error, RankLost)
    report_failure(None if is_loss else f"{type(error).__name__}: {error}", user_error=False)
    return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Without the interpreter's teardown: threads of the process group may outlive it and abort.
    os._exit(code)
