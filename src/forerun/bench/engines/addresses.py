"""Running servers by their URLs: reading a URL, comparing two of them, and asking which model a server has."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

from yarl import URL

from forerun.bench.engines.dialects import DIALECTS, Dialect
from forerun.bench.engines.openai import Address
from forerun.bench.records.redaction import hide, remember
from forerun.checks import SettingError, require


class Place(NamedTuple):
    """url: without credentials. headers: the credentials of the URL."""

    url: str
    headers: Mapping[str, str]


def read(setting: str, text: str) -> Place:
    """A user's URL. A name and a password in it become a header for basic authentication. Raises SettingError for a text that
    is not the URL of a server, and for a URL with a query or a fragment, to which no path can be added."""
    example = "give a URL such as http://127.0.0.1:8000"
    try:
        url = URL(text)
    except ValueError as error:
        raise SettingError(setting, hide(text), f"not a URL ({error}); {example}") from None
    require(url.scheme in ("http", "https") and bool(url.host), setting, hide(text), example)
    remedy = "leave out what stands behind the path; a key is given with --api-key-env, or with --header 'NAME: VALUE'"
    require(not url.query_string and not url.fragment, setting, hide(text), remedy)
    headers = {}
    if url.user is not None or url.password is not None:
        credentials = f"{url.user or ''}:{url.password or ''}".encode()
        headers["Authorization"] = "Basic " + base64.b64encode(credentials).decode()
        remember(url.password or "", headers["Authorization"])
    return Place(str(url.with_user(None)).removesuffix("/" if url.path == "/" else ""), headers)


def same(one: Address, other: Address) -> bool:
    """Whether both are the same server and model, and requests get the same fields."""
    return _normal(one.root) == _normal(other.root) and one.model == other.model and one.body == other.body


def _normal(text: str) -> tuple[str, str | None, int | None, str]:
    url = URL(text)
    local = on_this_machine(text) or url.host in ("0.0.0.0", "::")
    return url.scheme, "127.0.0.1" if local else url.host, url.port, url.path.rstrip("/")


def on_this_machine(url: str) -> bool:
    """Whether the host of the URL is a loopback address, so that the server runs on this machine."""
    host = URL(url).host or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def look(setting: str, url: str, headers: Mapping[str, str], model: str | None) -> tuple[str, Dialect]:
    """The model of a running server, and its dialect by the owner of the model. model: the one that is wanted, None: the first.
    Raises SettingError."""
    models = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        with urllib.request.urlopen(urllib.request.Request(models, headers=dict(headers)), timeout=30) as response:
            listed = _listed(json.loads(response.read()))
    except urllib.error.HTTPError as error:
        remedy = "give its key with --api-key-env" if error.code in (401, 403) else "does it speak the OpenAI API?"
        raise SettingError(setting, hide(url), f"{models} answers HTTP {error.code} ({error.reason}); {remedy}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise SettingError(setting, hide(url), f"no list of models at {models} ({error}); is the server up?") from None
    found = next((one for one in listed if model is None or one.get("id") == model), None)
    if found is None:
        names = ", ".join(str(one.get("id")) for one in listed)
        raise SettingError("served_model", model, f"the server has {names or 'no models'}")
    owner = str(found.get("owned_by", "")).lower()
    dialect = next((d for d in DIALECTS.values() if d.owner and re.fullmatch(d.owner, owner)), DIALECTS["openai"])
    return str(found.get("id")), dialect


def _listed(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, dict) or not isinstance(value.get("data"), list):
        raise ValueError("the answer has no list named data")
    return [one for one in value["data"] if isinstance(one, dict)]
