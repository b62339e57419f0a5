#!/usr/bin/env bash
# Measures this project beside published packages of others, one JSON object a line:
#   run.sh DIR [--only PREFIX] [--rounds N]
# DIR keeps one environment for each side; what is missing there is installed first (minutes, gigabytes).
set -euo pipefail
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
  sed -n '2,4s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$here/../.."
exec "${PYTHON:-python3}" -m benchmarks.peers "$dir" "$@"
