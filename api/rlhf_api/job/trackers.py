"""`spec.trackers`: services that receive metrics or traces of a run, besides the files of its run folder."""

from typing import Annotated, Final, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel
from rlhf_api.job.reward_headers import SecretKey

SAMPLE_SHARE: Final = 0.05
"""Default share of the samples that have spans in traces."""


class WandbTracker(ApiModel):
    """Weights & Biases; the coordinator's image needs the extra wandb."""

    project: Annotated[str, Field(pattern=r"^[^/\\#?%: ]+$", max_length=128, examples=["rlhf"])]
    """Project of the run."""
    entity: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=128)] | None = None
    """User or team that owns the project. Unset: owner of the API key."""
    mode: Literal["Online", "Offline"] = "Online"
    """Online sends metrics as they come. Offline writes a folder below the run folder, for `wandb sync`."""
    api_key: SecretKey | None = None
    """Secret with the API key, the coordinator's WANDB_API_KEY."""


class MlflowTracker(ApiModel):
    """MLflow; the coordinator's image needs the extra mlflow."""

    uri: Annotated[
        str,
        Field(pattern=r"^(https?://[^/@ ]+(/[^ ]*)?|file:///[^ ]*)$", max_length=2048, examples=["http://mlflow:5000"]),
    ]
    """Tracking server, http or https without a password, or file:/// with a folder of the coordinator."""
    experiment: Annotated[str, Field(min_length=1, max_length=250)] = "rlhf"
    """Experiment of the run, created if missing."""
    token: SecretKey | None = None
    """Secret with the bearer token, the coordinator's MLFLOW_TRACKING_TOKEN."""


class OpenTelemetryTracker(ApiModel):
    """OpenTelemetry: OTLP spans of iterations, their phases and some samples."""

    endpoint: Annotated[
        str, Field(pattern=r"^https?://[^/@ ]+/?$", max_length=2048, examples=["http://otel-collector:4317"])
    ]
    """OTLP gRPC collector; http is plain text, https is TLS. If openTelemetry is unset, the coordinator's
    OTEL_EXPORTER_OTLP_ENDPOINT applies."""
    sample_share: Annotated[float, Field(ge=0, le=1, examples=[0.01])] = SAMPLE_SHARE
    """Share of an iteration's samples that have their own spans, chosen by a hash; 1: all."""
    headers: SecretKey | None = None
    """Secret with request headers, such as `authorization=Bearer ...`: the coordinator's OTEL_EXPORTER_OTLP_HEADERS."""


class Trackers(ApiModel):
    """Services that receive metrics or traces of every iteration. The job continues without a service that fails or
    hangs."""

    wandb: WandbTracker | None = None
    """Weights & Biases. Unset: none."""
    mlflow: MlflowTracker | None = None
    """MLflow. Unset: none."""
    open_telemetry: OpenTelemetryTracker | None = None
    """OpenTelemetry. Unset: none, unless the coordinator has OTEL_EXPORTER_OTLP_ENDPOINT."""

    @property
    def named(self) -> bool:
        """Whether the manifest configures a metrics tracker."""
        return self.wandb is not None or self.mlflow is not None

    def secret_variables(self) -> dict[str, SecretKey]:
        """Return environment variable of the coordinator -> its Secret key."""
        secret_keys = {
            "WANDB_API_KEY": self.wandb.api_key if self.wandb else None,
            "MLFLOW_TRACKING_TOKEN": self.mlflow.token if self.mlflow else None,
            "OTEL_EXPORTER_OTLP_HEADERS": self.open_telemetry.headers if self.open_telemetry else None,
        }
        return {name: key for name, key in secret_keys.items() if key is not None}
