"""Where things are mounted in a job's pods, and the keys of what is mounted there."""

from typing import Final

JOB_KEY: Final = "job.json"
"""Key of the ConfigMap, hence file name, of the resolved job."""
REVISION_KEY: Final = "revision.json"
"""Key of the same ConfigMap: what the operator pinned the job to. Pods do not read it."""
REWARD_KEY: Final = "reward.py"
"""Key of the user's ConfigMap that holds the reward function."""
ENVIRONMENT_KEY: Final = "environment.py"
"""Key of the user's ConfigMap that holds the environment of the rollout."""
CERTIFICATES_PATH: Final = "/etc/rlhf/certificates"
JOB_PATH: Final = "/etc/rlhf/job"
USER_CODE_PATH: Final = "/etc/rlhf"
"""The folders of ConfigMaps with users' code: of a reward function, of a named reward's, of an environment."""
RUN_PATH: Final = "/var/lib/rlhf"
"""Run folder of the coordinator in a job without checkpoints: it survives the container, not the pod."""
