"""Keys and tenants: who may ask, and that no tenant shares a cache with another."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.access import Access, Anyone, Tenant
from router.config import Auth
from router.errors import ConfigError, RequestError, Unauthorised


def access(*keys):
    return Access(Auth(keys=[{"tenant": t, "key_sha256": hashlib.sha256(k.encode()).hexdigest()} for t, k in keys]))


TWO = access(("acme", "key-a"), ("acme", "key-a2"), ("beta", "key-b"))


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ({"authorization": "Bearer key-a"}, "acme"),
        ({"authorization": "bearer  key-a2 "}, "acme"),
        ({"x-api-key": "key-b"}, "beta"),
        ({"authorization": "Basic eA==", "x-api-key": "key-b"}, "beta"),
    ],
)
def test_a_key_tells_its_tenant(headers, tenant):
    assert TWO.tenant(headers).name == tenant and TWO.knows(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer  "},
        {"authorization": "key-a"},
        {"authorization": "Basic key-a"},
        {"authorization": "Bearer key-A"},
        {"authorization": "Bearer key-a2x"},
        {"x-api-key": ""},
        {"x-api-key": hashlib.sha256(b"key-a").hexdigest()},
        {"authorization": "Bearer wrong", "x-api-key": "key-a"},
        {"authorization": "Bearer é\udc80"},
    ],
)
def test_no_key_or_a_wrong_one_is_refused_and_not_repeated(headers):
    assert not TWO.knows(headers)
    with pytest.raises(Unauthorised) as caught:
        TWO.tenant(headers)
    assert caught.value.status == 401 and "www-authenticate" in caught.value.headers()
    assert "key-" not in str(caught.value) and "wrong" not in str(caught.value)


def test_every_key_is_compared_whole_and_in_the_same_time(monkeypatch):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr("router.access.hmac.compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    for key in ("key-a", "key-b", "nothing"):
        TWO.knows({"x-api-key": key})
    assert len(compared) == 9 and all(len(a) == len(b) == 32 for a, b in compared)


def test_without_keys_anyone_is_served_and_the_salt_is_left_alone():
    everyone = access()
    assert everyone.is_open and everyone.knows({})
    tenant = everyone.tenant({"authorization": "Bearer anything"})
    body = {"cache_salt": ["x"], "model": "m"}
    assert isinstance(tenant, Anyone) and tenant.salted(body) is body


def test_a_key_from_the_environment(monkeypatch):
    monkeypatch.setenv("ACME_KEY", "secret")
    auth = Auth(keys=[{"tenant": "acme", "key_env": "ACME_KEY", "max_in_flight": 3}])
    assert Access(auth).tenant({"x-api-key": "secret"}) == Tenant("acme", 3)
    for value in (None, ""):
        monkeypatch.delenv("ACME_KEY") if value is None else monkeypatch.setenv("ACME_KEY", value)
        with pytest.raises(ConfigError, match="ACME_KEY"):
            Access(auth)


def test_a_key_belongs_to_one_tenant():
    with pytest.raises(ConfigError, match="'acme' and 'beta'") as caught:
        access(("acme", "same-key"), ("beta", "same-key"))
    assert "same-key" not in str(caught.value)


SALT = st.none() | st.text(max_size=6)
NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,4}", fullmatch=True)


@given(one=st.tuples(NAME, SALT), other=st.tuples(NAME, SALT))
def test_case_44_no_two_pairs_of_tenant_and_salt_share_a_salt(one, other):
    salts = []
    for name, salt in (one, other):
        body = {"model": "m"} if salt is None else {"model": "m", "cache_salt": salt}
        try:
            salts.append(Tenant(name).salted(body)["cache_salt"])
        except RequestError:  # text that is no text
            return
    assert (salts[0] == salts[1]) == (one == other)
    assert all(isinstance(salt, str) and len(salt) == 64 for salt in salts)


@pytest.mark.parametrize("salt", [3, ["a"], {"a": 1}, True, "\ud800"])
def test_a_salt_that_cannot_be_folded_is_refused(salt):
    with pytest.raises(RequestError) as caught:
        Tenant("acme").salted({"cache_salt": salt})
    assert caught.value.param == "cache_salt"
