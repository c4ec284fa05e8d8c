"""The upload of an exported folder to a repository of a model hub, with huggingface_hub.

Rule: the token is HF_TOKEN, or the token of an earlier login; it is no argument. HF_ENDPOINT selects another hub.
"""

import os
import re
from pathlib import Path
from typing import Final

from rlhf_cli.local.errors import RunError
from rlhf_common.names import ExitCode

REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REMEDIES: Final = {
    401: "the hub does not know the token; set HF_TOKEN to one that may write",
    403: "the token may not write there; set HF_TOKEN to one of the repository's owner",
    404: "the hub has no such owner, or does not show it to this token; set HF_TOKEN to one that may write",
}


def check_repository(repository: str) -> None:
    """Raise RunError for an invalid name of a repository, and for a missing token."""
    from huggingface_hub import get_token

    if not REPOSITORY.fullmatch(repository):
        raise RunError(f"--push {repository!r}: must be OWNER/NAME, of letters, digits, '-', '_' and '.'")
    if not get_token():
        raise RunError(f"--push {repository}: there is no token; set HF_TOKEN to one that may write")


def upload(folder: Path, repository: str, message: str, *, private: bool) -> str:
    """Upload all files of a folder in one commit; create the repository if it does not exist. Return its address.

    Raises RunError.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except OfflineModeIsEnabled as error:
        raise RunError(f"--push {repository}: HF_HUB_OFFLINE is set; unset it, or leave --push out") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        why = _REMEDIES.get(status, f"the hub answered {status}; try again, as the folder is at {folder}")
        raise RunError(f"--push {repository}: {why}", ExitCode.FAILED) from error
    except (httpx.HTTPError, OSError) as error:
        why = f"the hub cannot be reached: {type(error).__name__}; try again, as the folder is at {folder}"
        raise RunError(f"--push {repository}: {why}", ExitCode.FAILED) from error
    except (ValueError, KeyError) as error:
        why = f"what answers is no model hub ({type(error).__name__}); look at HF_ENDPOINT"
        raise RunError(f"--push {repository}: {why}", ExitCode.FAILED) from error
    return str(address)
