#!/usr/bin/env bash
# launch/replicas.sh [ARGUMENT ...]: several `tpllama serve ARGUMENT ...` and, on one address before them, nginx, which
# sends each request to the one that has the fewest (launch/replicas.conf). Reads from the environment
#   REPLICAS    how many (2)
#   TP          ranks of each (1)
#   HOST, PORT  where nginx listens (127.0.0.1, 8321); the replicas have the ports after that one, on 127.0.0.1
# Each has cores, GPUs, weights and a cache of its own (--kv-cache-memory bounds it). One that ends is started again,
# and the requests that it had are lost. Name models in ARGUMENT or in its run.yaml: nginx refuses to register, load or
# delete one, which would reach one replica alone. Each does so at its own port, and remembers it until this ends.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "$(readlink -f "$0")")/environment.sh"
refuse() { say "error: found $1"; exit 2; }

PATH=$PATH:/usr/sbin # where Debian has it
command -v nginx >/dev/null || fail 'found no nginx, do: apt install nginx-light'
replicas=${REPLICAS:-2} tp=${TP:-1} host=${HOST:-127.0.0.1} port=${PORT:-8321} arguments=("$@")
[[ "$replicas $tp $port" =~ ^([1-9][0-9]{0,4}( |$)){3}$ ]] ||
    refuse "REPLICAS=$replicas TP=$tp PORT=$port, expected numbers from 1 on, correct them"
[[ ! " $* " =~ \ (--(tp|host|port|state-file))[=\ ] ]] ||
    refuse "${BASH_REMATCH[1]}, expected TP, HOST and PORT in the environment (state files are made here), drop it"
config=''
for ((at = 0; at < $#; at++)); do
    case ${arguments[at]} in
        --config) config=${arguments[at + 1]-} ;;
        --config=*) config=${arguments[at]#*=} ;;
    esac
done
[[ -z $config || -r $config ]] || refuse "no file $config that can be read, expected a YAML file, check --config"
gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, || :)}
IFS=, read -ra gpus <<<"${gpus/#-1*/}"
((${#gpus[@]} == 0 || ${#gpus[@]} >= replicas * tp)) ||
    refuse "${#gpus[@]} GPUs, expected $replicas x $tp, set REPLICAS and TP, or CUDA_VISIBLE_DEVICES= for none"
make_environment serve

# The threads of a rank, then a line with each replica's cores: none where the user placed threads, or they are too few.
mapfile -t shares < <("$venv/bin/python" - "$replicas" "$tp" <<'END'
import os, sys
from tpllama.parallel.place import Place, own_cores, threads_per_rank
count, tp = map(int, sys.argv[1:])
print(threads_per_rank(count * tp, os.environ))
for replica in range(count):  # shared as among so many ranks that follow one
    print(*sorted(own_cores(Place(1, count + 1, replica, count), os.environ) or ()), sep=",")
END
)
export OMP_NUM_THREADS=${shares[0]:?}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod 711 "$folder" # nginx started by root works as another user
alone=(setsid setpriv --pdeathsig TERM) # a Ctrl-C comes to this script alone, and nothing outlives it

pids=() is_stopping=''
start() { # start NUMBER, from 1
    local command=("${alone[@]}") at=$((port + $1))
    [[ -z ${shares[$1]} ]] || command+=(taskset -c "${shares[$1]}")
    ((${#gpus[@]} == 0)) || command+=(env "CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${gpus[*]:($1 - 1) * tp:tp}")")
    "${command[@]}" "$venv/bin/tpllama" serve "${arguments[@]}" --tp "$tp" --host 127.0.0.1 --port "$at" \
        --state-file "$folder/$at.json" &
    pids[$1]=$!
}
stop() { # a second signal doesn't wait for requests: so it is with each replica
    is_stopping=1
    kill -QUIT "$balancer" 2>/dev/null || :
    kill "${pids[@]}" 2>/dev/null || :
}
is_alive() { kill -0 "$@" 2>/dev/null; }

mapfile -t addresses < <(printf '127.0.0.1:%s\n' $(seq $((port + 1)) $((port + replicas))))
# One that failed gets one request every 5 s until it has answered one: few wait for it while it loads.
servers=$(printf ' server %s max_fails=1 fail_timeout=5s;' "${addresses[@]}")
cat >"$folder/nginx.conf" <<END
daemon off; pid nginx.pid; error_log stderr error;
worker_processes 1; # one alone knows how many requests each replica has
worker_rlimit_nofile 16384; events { worker_connections 8000; }
http {
    access_log off; server_tokens off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
    upstream replicas { least_conn;$servers }
    server { listen $host:$port backlog=2048; set \$replicas "${addresses[*]}"; include "$root/launch/replicas.conf"; }
}
END
"${alone[@]}" nginx -p "$folder" -c nginx.conf -e stderr &
balancer=$!
trap stop TERM INT
for ((number = 1; number <= replicas; number++)); do start "$number"; done
say "$replicas replicas (${addresses[*]}) behind http://$host:$port"

code=0
until [[ $is_stopping ]]; do
    sleep 0.5 &
    wait $! || continue # a signal
    if ! is_alive "$balancer"; then
        say "error: found that nginx ended, expected $host:$port to be free and nothing wrong by the lines above"
        code=1 && stop && break
    fi
    for number in "${!pids[@]}"; do
        ! is_alive "${pids[number]}" || continue
        ended=0 && wait "${pids[number]}" || ended=$?
        if ((ended == 2)); then code=2 && stop && break; fi # what was asked for can't work
        [[ $is_stopping ]] || say "replica ${addresses[number - 1]} ended with exit code $ended, starting it again"
        [[ $is_stopping ]] || start "$number"
    done
done
while is_alive "${pids[@]}"; do sleep 0.1; done
kill "$balancer" 2>/dev/null || : # nothing is left that it could wait for
wait
exit "$code"
