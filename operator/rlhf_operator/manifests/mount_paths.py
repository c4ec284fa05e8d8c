"""Mount paths of a job's pods, and the keys of the mounted files."""

from typing import Final

JOB_KEY: Final = "job.json"
"""ConfigMap key, and so file name, of the resolved job."""
REVISION_KEY: Final = "revision.json"
"""Key in the same ConfigMap of the revision that the operator pinned the job to."""
REWARD_KEY: Final = "reward.py"
"""Key of the reward function in the user's ConfigMap."""
ENVIRONMENT_KEY: Final = "environment.py"
"""Key of the rollout environment in the user's ConfigMap."""
CERTIFICATES_PATH: Final = "/etc/rlhf/certificates"
JOB_PATH: Final = "/etc/rlhf/job"
USER_CODE_PATH: Final = "/etc/rlhf"
"""Parent folder of mounted ConfigMaps with users' code, and of the two folders above."""
RUN_PATH: Final = "/var/lib/rlhf"
"""Run folder of the coordinator in a job without checkpoints; it survives the container but not the pod."""
