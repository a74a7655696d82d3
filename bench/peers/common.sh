# What the set-up scripts share: sourced by each, after it has set PEER.
# A peer lives in ${TPLLAMA_PEERS:-~/.cache/tpllama-peers}/PEER: venv/, what was built, and `ready` once it is whole.
set -euo pipefail
home="${TPLLAMA_PEERS:-$HOME/.cache/tpllama-peers}/$PEER"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
log="$home/setup.log"
step="starting"

if [ -e "$home/ready" ]; then
    echo "$PEER: already set up ($(cat "$home/ready")); remove $home to do it again"
    exit 0
fi
mkdir -p "$home"
: >"$log"
trap 'echo "$PEER: error: $step failed, see $log" >&2' ERR

say() {
    step="$1"
    echo "$PEER: $1"
}

# A venv of the peer's own. Anything looser than this pin of torch may pull gigabytes of CUDA.
make_venv() {
    say "making a venv"
    [ -x "$home/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$home/venv" >>"$log" 2>&1
    echo "torch==2.13.0" >"$home/constraints.txt"
}

install() {
    say "installing $*"
    "$home/venv/bin/pip" install -q -c "$home/constraints.txt" "$@" >>"$log" 2>&1
}

version_of() {
    "$home/venv/bin/python" -c "import sys; from importlib.metadata import version; print(version(sys.argv[1]))" "$1"
}

finish() {
    echo "$1" >"$home/ready"
    echo "$PEER: ready, $1"
}
