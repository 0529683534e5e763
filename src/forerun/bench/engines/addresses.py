"""Running servers by their URLs: how a URL is read, whether two of them are the same server, and what a server says that it is.
Sends one request, for its list of models.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from forerun.bench.engines.openai import DIALECTS, Address, Dialect
from forerun.bench.records.redaction import hide, remember
from forerun.types import SettingError, require

OWNERS = {"vllm": "vllm", "llamacpp": "llamacpp", "llama.cpp": "llamacpp", "sglang": "sglang"}


class Place(NamedTuple):
    """Where a server is. url: without credentials. headers: those that its URL stands for."""

    url: str
    headers: Mapping[str, str]


def read(setting: str, url: str) -> Place:
    """A user's URL. A name and a password in it become a header for basic authentication, so that they are written nowhere.
    Raises SettingError for what is no URL of a server, and for one with a query, which no path could be added to."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SettingError(setting, hide(url), f"no URL ({error}); give one such as http://127.0.0.1:8000") from None
    require(parts.scheme in ("http", "https") and bool(host), setting, hide(url), "give a URL such as http://127.0.0.1:8000")
    remedy = "leave out what stands behind the path; a key is given with --api-key-env, or with --header 'NAME: VALUE'"
    require(not parts.query and not parts.fragment, setting, hide(url), remedy)
    headers = {}
    if parts.username is not None:
        name, password = unquote(parts.username), unquote(parts.password or "")
        remember(password)
        headers["Authorization"] = "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()
        remember(headers["Authorization"])
    shown = f"[{host}]" if host and ":" in host else host
    return Place(urlunsplit((parts.scheme, f"{shown}:{port}" if port else f"{shown}", parts.path, "", "")), headers)


def same(one: Address, other: Address) -> bool:
    """Whether both answer the same: one server, one model, the same fields added to each request."""
    return _normal(one.root) == _normal(other.root) and one.model == other.model and one.body == other.body


def on_this_machine(url: str) -> bool:
    """Whether a server is reached over the loopback device, so that it runs on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _normal(url: str) -> tuple[str, str, int, str]:
    parts = urlsplit(url)
    host = "127.0.0.1" if on_this_machine(url) or parts.hostname in ("0.0.0.0", "::") else parts.hostname or ""
    return parts.scheme, host, parts.port or {"http": 80, "https": 443}[parts.scheme], parts.path.rstrip("/")


def look(setting: str, url: str, headers: Mapping[str, str], model: str | None) -> tuple[str, Dialect]:
    """What model a running server serves, and which engine it is, by its list of models. Raises SettingError."""
    root = url.rstrip("/").removesuffix("/v1")
    try:
        request = urllib.request.Request(f"{root}/v1/models", headers=dict(headers))
        with urllib.request.urlopen(request, timeout=30) as response:
            listed = [one for one in _listed(json.loads(response.read())) if isinstance(one, dict)]
    except urllib.error.HTTPError as error:
        remedy = "give its key with --api-key-env" if error.code in (401, 403) else "does it speak the OpenAI API?"
        raise SettingError(
            setting, hide(url), f"{root}/v1/models answers HTTP {error.code} ({error.reason}); {remedy}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise SettingError(setting, hide(url), f"no list of models at {root}/v1/models ({error}); is the server up?") from None
    found = next((one for one in listed if model is None or one.get("id") == model), None)
    if found is None:
        names = ", ".join(str(one.get("id")) for one in listed)
        raise SettingError("served_model", model, f"the server has {names or 'no models'}")
    owner = str(found.get("owned_by", "")).lower()
    return str(found.get("id")), DIALECTS[OWNERS.get(owner, "tensorrt-llm" if "tensorrt" in owner else "openai")]


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, dict) or not isinstance(value.get("data"), list):
        raise ValueError("the answer has no list named data")
    return list(value["data"])
