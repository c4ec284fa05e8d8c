"""`python -m rlhf_workers`: one worker process, told by its environment (`names.Env`) who it is and whom to dial.

Rule: only what must come first is here: log format, thread count, exit code. The last log line says why it ended.
"""

import logging
import os
import signal
import sys
import time

log = logging.getLogger("rlhf_workers")


def main() -> int:
    """Exit code of the process (`names.ExitCode`)."""
    started = time.monotonic()
    from rlhf_common.names import ExitCode
    from rlhf_workers.addresses import AddressInUseError, open_endpoint
    from rlhf_workers.loading import uncollected
    from rlhf_workers.logs import configure_logs, flush_logs
    from rlhf_workers.settings import SettingsError, read_settings

    try:
        settings = read_settings(os.environ)
    except SettingsError as error:
        configure_logs("worker", json_lines=False)
        log.error("%s", error)
        return ExitCode.USAGE
    configure_logs(settings.worker, json_lines=settings.json_logs)
    # Nothing is held yet; the agent installs its own handler once there is something to close.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.OK))
    # Before torch is loaded: its thread pools are sized once.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    # Before gRPC is: it reports every connection that a restarted peer closed, in a format of its own.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    try:
        # Before torch is loaded: a kubelet asks from now on.
        endpoint = open_endpoint(settings.metrics)
        with uncollected():
            import torch

            from rlhf_workers.agent import run_agent
        torch.set_num_threads(settings.threads)
        log.info("pid %d, %d threads, up after %.1f s", os.getpid(), settings.threads, time.monotonic() - started)
        code = run_agent(settings, endpoint)
    except AddressInUseError as error:
        log.error("%s", error)
        code = ExitCode.ADDRESS_IN_USE
    except SettingsError as error:
        log.error("%s", error)
        code = ExitCode.USAGE
    except Exception as error:
        log.error("the worker failed: %s", error, exc_info=error)
        code = ExitCode.FAILED
    flush_logs()
    return code


if __name__ == "__main__":
    exit_code = main()
    # A compute thread that is still busy must not delay the end, nor run while the interpreter is torn down.
    sys.stdout.flush()
    os._exit(exit_code)
