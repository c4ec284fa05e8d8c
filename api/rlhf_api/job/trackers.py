"""`spec.trackers`: services that are given the metrics or the traces of a run, beside the files of its run folder."""

from typing import Annotated, Final, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel
from rlhf_api.job.reward_headers import SecretKey

SAMPLE_SHARE: Final = 0.05
"""Of the samples, those that traces tell of unless the manifest says otherwise."""


class WandbTracker(ApiModel):
    """Weights & Biases; the coordinator's image needs the extra wandb."""

    project: Annotated[str, Field(pattern=r"^[^/\\#?%: ]+$", max_length=128, examples=["rlhf"])]
    """Project that the run belongs to."""
    entity: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=128)] | None = None
    """User or team that owns the project; that of the key when unset."""
    mode: Literal["Online", "Offline"] = "Online"
    """Online sends metrics as they come. Offline writes a folder below the run folder, for `wandb sync`."""
    api_key: SecretKey | None = None
    """Secret with the API key, WANDB_API_KEY of the coordinator."""


class MlflowTracker(ApiModel):
    """MLflow; the coordinator's image needs the extra mlflow."""

    uri: Annotated[
        str,
        Field(pattern=r"^(https?://[^/@ ]+(/[^ ]*)?|file:///[^ ]*)$", max_length=2048, examples=["http://mlflow:5000"]),
    ]
    """Tracking server, http or https without a password, or file:/// with a folder of the coordinator."""
    experiment: Annotated[str, Field(min_length=1, max_length=250)] = "rlhf"
    """Experiment that the run belongs to, which is made where there is none."""
    token: SecretKey | None = None
    """Secret with the bearer token, MLFLOW_TRACKING_TOKEN of the coordinator."""


class OpenTelemetryTracker(ApiModel):
    """OpenTelemetry: spans of iterations, of their phases and of some samples, by OTLP."""

    endpoint: Annotated[
        str, Field(pattern=r"^https?://[^/@ ]+/?$", max_length=2048, examples=["http://otel-collector:4317"])
    ]
    """Collector that takes OTLP by gRPC; http is plain text, https is TLS. Without this mapping
    OTEL_EXPORTER_OTLP_ENDPOINT of the coordinator names it, if it is set."""
    sample_share: Annotated[float, Field(ge=0, le=1, examples=[0.01])] = SAMPLE_SHARE
    """Share of the samples of an iteration that have spans of their own, chosen by their number; 1: all."""
    headers: SecretKey | None = None
    """Secret with headers of the requests, such as `authorization=Bearer ...`: OTEL_EXPORTER_OTLP_HEADERS of the
    coordinator."""


class Trackers(ApiModel):
    """Services that are given the metrics or the traces of every iteration. One that fails or hangs is given up, and
    the job goes on."""

    wandb: WandbTracker | None = None
    """Weights & Biases. Unset: none."""
    mlflow: MlflowTracker | None = None
    """MLflow. Unset: none."""
    open_telemetry: OpenTelemetryTracker | None = None
    """OpenTelemetry. Unset: none, unless OTEL_EXPORTER_OTLP_ENDPOINT of the coordinator is set."""

    @property
    def named(self) -> bool:
        """Whether the manifest names any that is given metrics."""
        return self.wandb is not None or self.mlflow is not None

    def secret_variables(self) -> dict[str, SecretKey]:
        """Return environment variable of the coordinator -> the key of a Secret that it holds."""
        given = {
            "WANDB_API_KEY": self.wandb.api_key if self.wandb else None,
            "MLFLOW_TRACKING_TOKEN": self.mlflow.token if self.mlflow else None,
            "OTEL_EXPORTER_OTLP_HEADERS": self.open_telemetry.headers if self.open_telemetry else None,
        }
        return {name: key for name, key in given.items() if key is not None}
