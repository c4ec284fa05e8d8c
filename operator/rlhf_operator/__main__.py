"""`python -m rlhf_operator`: the operator process.

It can be killed at any moment: jobs keep running, and the next process continues. Exit codes: 0 after SIGTERM or
SIGINT, 2 when the process cannot start, 1 otherwise.
"""

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, NoReturn

from pydantic import TypeAdapter, ValidationError

from rlhf_api.job.scheduling import OPERATOR_CLASS_MAX, OperatorClass
from rlhf_common.names import ExitCode
from rlhf_operator import health, operator_logs, watch_events, watches
from rlhf_operator.api_client.client import KubernetesClient, connect
from rlhf_operator.api_client.connection import ConnectionConfigError
from rlhf_operator.api_client.resources import CORE_RESOURCES
from rlhf_operator.certificates import LIFETIME
from rlhf_operator.controller import Controller
from rlhf_operator.coordinator_client import Coordinators
from rlhf_operator.definition import Definition
from rlhf_operator.events import EventPoster
from rlhf_operator.gang import discovery
from rlhf_operator.gang.apis import MODES, ServedApis
from rlhf_operator.gang.apis import RESOURCES as GANG_RESOURCES
from rlhf_operator.index import Index
from rlhf_operator.leader import Leader, LeaseLostError
from rlhf_operator.manifests import Images
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.reconcile_traces import open_reconcile_traces
from rlhf_operator.resync import RestoredError, Resync
from rlhf_operator.watch_events import WatchEventHandler
from rlhf_operator.workqueue import WorkQueue

log = logging.getLogger("rlhf_operator")

RESOURCES: Final = {**CORE_RESOURCES, **GANG_RESOURCES}
"""The kinds that the operator reads and writes."""
CONCURRENCY: Final = 16
"""Default of --concurrency: reconciles that may run at the same time."""
USER_MAX: Final = 2**31 - 1
"""Largest user id that the API server accepts."""
SHORTEST_CERTIFICATE: Final = 30
"""Shortest certificate lifetime in seconds that the command line accepts."""
GC_THRESHOLDS: Final = (10_000, 10, 10)
"""Thresholds of Python's garbage collector, which collects young objects more rarely than by default."""
NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
END_SECONDS: Final = 4
"""Seconds that tasks have to end when the operator stops; less than LEASE_SECONDS - RENEW_DEADLINE."""


@dataclass(frozen=True)
class OperatorOptions:
    """The parsed command line."""

    namespaces: tuple[str, ...]
    images: Images
    health: str
    metrics: str
    lease_namespace: str
    home: str
    """Namespace of the operator's pod, from NAMESPACE_FILE; empty if that does not exist."""
    leader_election: bool
    concurrency: int
    json_logs: bool
    certificate_lifetime: timedelta
    operator_class: str = ""
    """Jobs with this spec.operatorClass are reconciled; if empty, the jobs without one."""
    trace_share: float = 1.0
    """Share of reconciles whose traces are sent, if there is an endpoint. Above 0, traces of failed ones are sent too.
    """
    scheduling: tuple[str, ...] = MODES
    """Gang backends and queues that may be used."""
    ignore_queue_labels: bool = False
    """Whether a job starts outside its queue if the queue that its labels name cannot be used."""


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m rlhf_operator", description="Reconciles RLHFJobs into pods.")
    default = Images()
    parser.add_argument("--namespace", action="append", default=[], help="watch this namespace only; may be repeated")
    parser.add_argument("--coordinator-image", default=default.coordinator, help="image of coordinators")
    parser.add_argument("--worker-image", default=default.worker, help="image of workers")
    vllm_help = "image of generation workers that decode by vLLM; by default that of all workers"
    parser.add_argument("--vllm-worker-image", default=default.vllm_worker, metavar="IMAGE", help=vllm_help)
    user_help = (
        "user and group of pods whose templates name none, above 0; none: the cluster's choice, as OpenShift makes it"
    )
    parser.add_argument("--run-as-user", type=_user, default=default.user, metavar="ID|none", help=user_help)
    every = "host:port of %s; [::] is every address of IPv6 and IPv4"
    parser.add_argument("--health-address", default="[::]:8081", help=every % "/healthz and /readyz")
    parser.add_argument("--metrics-address", default="[::]:8080", help=every % "/metrics")
    parser.add_argument("--lease-namespace", default="", help="namespace of the Lease; that of the pod by default")
    parser.add_argument("--no-leader-election", action="store_true", help="there is no second operator")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, help="reconciles at once")
    class_help = "reconcile only jobs of this spec.operatorClass; by default jobs without one"
    parser.add_argument("--operator-class", default="", metavar="NAME", help=class_help)
    lifetime = int(LIFETIME.total_seconds())
    listed = f"gangs and queues that may be used, of {','.join(MODES)}, separated by commas; all by default"
    parser.add_argument("--scheduling", default=",".join(MODES), metavar="NAMES", help=listed)
    ignore_help = "start jobs whose labels name a queue that cannot be used, outside all quota; by default they wait"
    parser.add_argument("--ignore-queue-labels", action="store_true", help=ignore_help)
    lifetime_help = "of jobs' certificates; renewed when a third is left"
    parser.add_argument("--certificate-lifetime-seconds", type=int, default=lifetime, metavar="N", help=lifetime_help)
    share_help = (
        "share of reconciles whose traces go to OTEL_EXPORTER_OTLP_ENDPOINT; 0 sends none, otherwise all failed "
        "reconciles are sent"
    )
    parser.add_argument("--trace-share", type=float, default=1.0, metavar="SHARE", help=share_help)
    parser.add_argument("--log-format", choices=("json", "text"), default="json")
    return parser


def options(arguments: Sequence[str]) -> OperatorOptions:
    """Parse the command line and read NAMESPACE_FILE; exit the process with code 2 if the command line is wrong."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.concurrency < 1:
        parser.error(f"--concurrency: {parsed.concurrency}: must be at least 1")
    if not 0 <= parsed.trace_share <= 1:
        parser.error(f"--trace-share: {parsed.trace_share}: must be from 0 to 1")
    if parsed.certificate_lifetime_seconds < SHORTEST_CERTIFICATE:
        least = f"must be at least {SHORTEST_CERTIFICATE}"
        parser.error(f"--certificate-lifetime-seconds: {parsed.certificate_lifetime_seconds}: {least}")
    if parsed.operator_class and not _is_class(parsed.operator_class):
        least = f"must be at most {OPERATOR_CLASS_MAX} lower case letters, digits and '-', such as blue"
        parser.error(f"--operator-class: {parsed.operator_class}: {least}")
    scheduling = tuple(item for item in parsed.scheduling.split(",") if item)
    if unknown := sorted(set(scheduling) - set(MODES)):
        parser.error(f"--scheduling: {unknown[0]}: must be of {', '.join(MODES)}")
    home = NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.exists() else ""
    return OperatorOptions(
        namespaces=tuple(parsed.namespace),
        images=Images(parsed.coordinator_image, parsed.worker_image, parsed.run_as_user, parsed.vllm_worker_image),
        health=parsed.health_address,
        metrics=parsed.metrics_address,
        lease_namespace=parsed.lease_namespace or home or "default",
        home=home,
        leader_election=not parsed.no_leader_election,
        concurrency=parsed.concurrency,
        json_logs=parsed.log_format == "json",
        trace_share=parsed.trace_share,
        certificate_lifetime=timedelta(seconds=parsed.certificate_lifetime_seconds),
        scheduling=scheduling,
        ignore_queue_labels=parsed.ignore_queue_labels,
        operator_class=parsed.operator_class,
    )


def _user(text: str) -> int | None:
    """Return the value of --run-as-user. Raises ArgumentTypeError."""
    if text == "none":
        return None
    if not text.isdecimal() or not 0 < int(text) <= USER_MAX:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 1 to {USER_MAX}, or none")
    return int(text)


def _is_class(name: str) -> bool:
    try:
        TypeAdapter(OperatorClass).validate_python(name)
    except ValidationError:
        return False
    return True


async def operate(options: OperatorOptions, client: KubernetesClient) -> int:
    """Wait until RLHFJobs are served, and for the lease; then work until a task ends. Return the exit code."""
    identity = f"{os.environ.get('HOSTNAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    metrics = OperatorMetrics()
    index = Index(watch_events.unreadable_reporter(metrics), options.operator_class)
    events = EventPoster(client, identity)
    queue = WorkQueue(lambda key: controller.reconcile(key), options.concurrency)
    coordinators = Coordinators(queue.add)
    traces = metrics.traces = open_reconcile_traces(options.trace_share)
    lifetime = options.certificate_lifetime
    controller = Controller(
        client,
        index,
        options.images,
        metrics,
        coordinators,
        events,
        certificate_lifetime=lifetime,
        home=options.home,
        traces=traces,
    )
    resync = Resync(client, index, queue, options.namespaces)

    def answered(verb: str, resource: str, code: int) -> None:
        metrics.answered(verb, resource, code)
        if code == 0:
            resync.soon()

    client.transport.on_answer = answered
    client.transport.on_break = resync.soon
    leader = Leader(client, options.lease_namespace, identity, operator_class=options.operator_class)
    addresses = sorted({options.health, options.metrics})
    definition = Definition(client, options.namespaces)
    served = await health.serve(
        addresses, queue.snapshot, lambda: resync.silent_rounds, metrics, lambda: definition.problem
    )
    try:
        await definition.served()
        if options.leader_election:
            await leader.acquire()
        apis = await discovery.first(client, options.scheduling, ignores_labels=options.ignore_queue_labels)
        log.info("gangs and queues: %s", apis.usable() or "none")
        if options.leader_election:
            # Discovery may have outlasted the lease.
            await leader.acquire()
            log.info("leads as %s", identity)
        controller.use(apis)
        resync.watched = {**watch_events.WATCHED, **apis.watched()}
        metrics.leader.set(1)
        return await work(options, client, index, queue, metrics, resync, leader, apis, definition)
    finally:
        await coordinators.close()
        await events.close()
        await asyncio.to_thread(traces.close)
        await served.cleanup()


async def work(
    options: OperatorOptions,
    client: KubernetesClient,
    index: Index,
    queue: WorkQueue,
    metrics: OperatorMetrics,
    resync: Resync,
    leader: Leader,
    apis: ServedApis,
    definition: Definition,
) -> int:
    """Watch and reconcile until asked to stop or until a task ends; return the exit code."""
    listings = watches.first_listings(options.namespaces, resync.watched)
    handler = WatchEventHandler(index, queue, metrics, listings, resync.soon)
    watching = watches.watch(client.transport, handler, metrics, options.namespaces, resync.watched, definition.served)
    others = {
        "stop": asked_to_stop(),
        "watch": watching,
        "queue": queue.run(),
        "resync": resync.run(),
    }
    others["apis"] = discovery.changed(client, apis)
    if options.leader_election:
        others["lease"] = leader.hold()
    tasks = [asyncio.create_task(each, name=name) for name, each in others.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await ended(tasks)
        # The tasks were cancelled before, so that they do not write beside a successor.
        await leader.release()
    return verdict(done)


def verdict(done: set[asyncio.Task[None]]) -> int:
    """Return the exit code for the tasks that ended first; log their error."""
    for task in done:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, LeaseLostError | discovery.ApisChangedError | RestoredError):
            log.error("%s", error)
            return ExitCode.FAILED
        if error is not None:
            log.error("%s ended", task.get_name(), exc_info=error)
            return ExitCode.FAILED
    asked = any(task.get_name() == "stop" for task in done)
    return ExitCode.OK if asked else ExitCode.FAILED


async def ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the tasks up to END_SECONDS times, and wait for their end for at most a second after each time.

    Cancellation is repeated because a task may swallow one.
    """
    pending = set(tasks)
    for _ in range(END_SECONDS):
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=1)
        if not pending:
            break
    else:
        log.error("still running after %d s: %s", END_SECONDS, ", ".join(sorted(task.get_name() for task in pending)))
    await asyncio.gather(*(set(tasks) - pending), return_exceptions=True)


async def asked_to_stop() -> None:
    """Wait for SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


async def run(options: OperatorOptions) -> NoReturn:
    """Connect and operate until a signal or a failure, then end the process. Raises ConnectionConfigError."""
    client = await connect(resources=RESOURCES)
    task = asyncio.create_task(operate(options, client))
    # These handlers apply until asked_to_stop() installs its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    code = int(ExitCode.OK)
    try:
        code = await task
    except asyncio.CancelledError:
        log.info("asked to stop before it led")
    except OSError as error:
        log.error("%s", error)
        code = ExitCode.USAGE
    except Exception:
        log.exception("the operator failed")
        code = ExitCode.FAILED
    await client.close()
    logging.shutdown()
    # An orderly end would wait for kopf's thread.
    os._exit(code)


def main() -> int:
    """Run the process; return its exit code if there is no usable configuration of an API server."""
    settings = options(sys.argv[1:])
    gc.set_threshold(*GC_THRESHOLDS)
    operator_logs.configure(json_lines=settings.json_logs)
    try:
        asyncio.run(run(settings))
    except ConnectionConfigError as error:
        log.error("no way to the cluster: %s", error)
        return ExitCode.USAGE


if __name__ == "__main__":
    sys.exit(main())
