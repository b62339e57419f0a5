#!/usr/bin/env bash
# Makes the environment of one side, unless it is there: prepare.sh DIR ours|sglang|lmcache
# torch comes first and by its pinned version; any other range may fetch gigabytes for a GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
side=$2
venv=$1/$side
case $side in ours) pins=$root/constraints.txt ;; *) pins=$here/$side.txt ;; esac
if [ -f "$venv/.prepared" ] && cmp -s "$pins" "$venv/.prepared"; then
  exit 0
fi
echo "installing $side into $venv ..." >&2
"${PYTHON:-python3}" -m venv "$venv"
install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@" >&2; }
install "$(grep '^torch==' "$pins")"
case $side in
  ours)
    install -c "$pins" hatchling editables
    install -c "$pins" --no-build-isolation -e "$root"
    ;;
  sglang | lmcache)
    # Without their dependencies, most of which are for GPUs: the pins name what is used here.
    install --no-deps -r "$pins"
    ;;
  *)
    echo "unknown side $side" >&2
    exit 2
    ;;
esac
cp "$pins" "$venv/.prepared"
