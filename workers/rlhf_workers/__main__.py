"""Entry point of one worker process: `python -m rlhf_workers`.

This module sets the log format and the thread count before it loads the agent, and turns an exception into an exit
code.
"""

import logging
import os
import signal
import sys
import time

log = logging.getLogger("rlhf_workers")


def main() -> int:
    """Run the worker and return the exit code (`names.ExitCode`)."""
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
    # Nothing needs closing yet. The agent installs its own handler later.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.OK))
    # Set before torch is loaded: it sizes its thread pools once.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    # Set before gRPC is loaded, to silence its reports of closed connections.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    try:
        # Open the endpoint before torch is loaded: probes may come from now on.
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
    # A compute thread that is still busy must not delay the exit, nor run while the interpreter shuts down.
    sys.stdout.flush()
    os._exit(exit_code)
