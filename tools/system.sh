#!/usr/bin/env bash
# What pip has not, from Debian, where we may install it: Mooncake's RDMA library, network namespaces for its test, and a
# browser for the test of the router's page. Where it is missing those tests are skipped, and say so.
set -euo pipefail

missing=()
ldconfig -p | grep -q libibverbs.so.1 || missing+=(libibverbs1)
command -v ip >/dev/null || missing+=(iproute2)
command -v chromium >/dev/null || missing+=(chromium)
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed: ${missing[*]}; the tests that need them are skipped" >&2
    exit 0
fi
apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    echo "could not install ${missing[*]}; the tests that need them are skipped" >&2
