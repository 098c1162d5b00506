#!/usr/bin/env bash
# Finds a browser for tests/browser, or installs one: by apt as root, else by Playwright (install.sh PLAYWRIGHT).
# Where neither can be done it says so and ends well: the tests are skipped then.
set -uo pipefail

for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then
    echo "tests/browser will use $(command -v "$name")."
    exit 0
  fi
done

by_apt() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  echo "Installing chromium by apt (a minute or two) ..."
  export DEBIAN_FRONTEND=noninteractive
  timeout 300 apt-get -qq update >/dev/null 2>&1
  timeout 600 apt-get -qq install --no-install-recommends --yes chromium >/dev/null 2>&1 && command -v chromium >/dev/null
}

by_playwright() {
  echo "Installing chromium by Playwright (a minute or two) ..."
  timeout 600 "$1" install chromium >/dev/null 2>&1
}

by_apt || by_playwright "$1" ||
  echo "No browser could be installed: tests/browser will be skipped. Debian: apt install chromium."
