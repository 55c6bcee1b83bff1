"""Files of the Hugging Face hub: asked for once where it answers, else taken from what was fetched before.

The hub's own client tries a request six times before it gives up, and a model consists of several files: without a
network that is a minute of warnings. So one short request asks first whether the hub is there at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 5.0


def why_unreachable() -> str | None:
    """The reason why nothing can be fetched from the hub, or None when it answers.

    One request of at most `TIMEOUT_S` for each step of the connection, through the hub client's own session, so that
    proxies and certificates are those of the download.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except Exception as error:
        # Every version of the client has errors of another library. Whatever it is, a download would meet it too.
        reason = str(error) or type(error).__name__
        return f"{constants.ENDPOINT} could not be reached: {reason}"
    return None


def cached_file(repository: str, names: Sequence[str]) -> Path | None:
    """The first of these files of a hub repository that was fetched before; None when there is none."""
    from huggingface_hub import try_to_load_from_cache

    found = (try_to_load_from_cache(repository, name) for name in names)
    return next((Path(path) for path in found if isinstance(path, str)), None)


def not_there(who: str, what: str, reason: str, instead: str) -> OSError:
    """The error for a file that is not on this machine and cannot be fetched.

    Args:
        who: the model as the user named it.
        what: what is wanted, e.g. "weights owner/name".
        reason: why it cannot be fetched, of `why_unreachable`.
        instead: how to load from a path.
    """
    return OSError(
        f"{who}: the {what} are not on this machine and the hub cannot be asked for them ({reason}); fetch them "
        f"where there is a network and load them by path: {instead}"
    )
