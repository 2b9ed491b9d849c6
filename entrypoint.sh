#!/usr/bin/env bash
# Starts, supervises and stops the two kinds of process: the worker, which owns the device, and the API server
# processes.
#
#   entrypoint.sh [serve] [flags]     serves (--help lists the flags; each has an environment variable too)
#   entrypoint.sh compile [flags]     compiles a model into a folder (compile --help)
#   entrypoint.sh plan [flags]        shows what fits on Inferentia2 and Trainium (plan --help)
#
# Exit code of serve: 0 after SIGTERM, SIGINT or SIGHUP, 1 when a process died, 2 for a configuration or model that
# cannot be served (one line says why). Nothing survives: no process, no socket file.
# shellcheck disable=SC2154 # settings.sh sets these variables
set -u

stops=0 # signals to stop so far; bash runs no trap inside a trap, so the handler only counts
trap 'stops=$((stops + 1))' TERM INT HUP # first of all: process 1 of a container gets no signal without a handler
# For a subshell: a signal to stop does not end its command, which would then look like one that failed. Ctrl-C, a
# closed terminal and `kill` of the process group send the signal to the command as well; this script acts on it
# when the command has ended.
ignore_stops() { trap '' TERM INT HUP; }
# For what failed: a subshell that a signal to stop has ended before it ignored it is no error.
end_if_stopped() { [ "$stops" -eq 0 ] || exit 0; }

here=$(ignore_stops && cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
# TGI's images set it; without the package hf_transfer, every download would fail.
unset HF_HUB_ENABLE_HF_TRANSFER
# A backtrace of a panic in the tokenizers library crashes the process: it cannot read the stacks of greenlets.
export RUST_BACKTRACE=0
python=${PYTHON:-$here/.venv/bin/python} # which `make run` makes
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
(ignore_stops && exec "$python" -c '
import sys
from importlib.util import find_spec
sys.exit(not (find_spec("msgspec") and find_spec("gevent")))
') || [ "$stops" -gt 0 ] || {
    echo "error: $python lacks what the server needs; \`make run\` in $here installs it" >&2
    exit 2
}

# Runs a module of this folder as a program; the caller's folder is not on Python's path.
run_module() {
    [ "$stops" -eq 0 ] || exit 143 # as SIGTERM ends the module itself, which does not know of an earlier one
    exec "$python" -c '
import runpy, sys
sys.path[0] = sys.argv.pop(1)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
' "$here" "$@"
}

case ${1:-} in
    serve) shift ;;
    compile) run_module models.neuron.compile "${@:2}" ;;
    plan) run_module models.neuron.plan "${@:2}" ;;
esac
end_if_stopped
for argument in "$@"; do
    case $argument in -h | --help | -V | --version) exec "$python" "$here/config.py" "$argument" ;; esac
done

# Each run has a private folder (0700), whose lock all of its processes hold. A folder with a free lock is
# left over from a run that was killed, in this container or in another that shares the parent folder, and is removed.
for lock in "${TMPDIR:-/tmp}"/neuron-textgen.*/lock; do
    folder=${lock%/lock}
    [ -O "$folder" ] && [ ! -L "$folder" ] && [ -f "$lock" ] && flock -n "$lock" rm -rf "$folder"
done
run_dir=$(ignore_stops && mktemp -d "${TMPDIR:-/tmp}/neuron-textgen.XXXXXXXX" 2>&1) || {
    end_if_stopped
    echo "error: ${run_dir#mktemp: }; name another folder with TMPDIR" >&2
    exit 2
}
# A child that a signal ends before its exec runs this trap, too.
trap '[ "$BASHPID" != $$ ] || rm -rf "$run_dir"' EXIT
# The lock has its final name only when it is locked.
exec 7>"$run_dir/lock.new" && flock 7 && mv "$run_dir/lock.new" "$run_dir/lock"
export NEURON_TEXTGEN_RUN_DIR=$run_dir
export NEURON_TEXTGEN_PARENT=$$ # see run.py
# Writes config.json, which the processes read, and settings.sh, which this script reads.
(ignore_stops && exec "$python" "$here/config.py" "$@") &
# A signal ends `wait`, and where the process ends at the same moment, bash has lost its code: what it has written
# counts. Files of the model folder may take long to read: a second signal ends that, too.
wait $!
code=$?
[ "$code" -le 128 ] || wait $!
[ -e "$run_dir/settings.sh" ] || {
    kill -KILL $!
    wait $!
    end_if_stopped
    exit "$code"
} 2>/dev/null
source "$run_dir/settings.sh"
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$model_cache/numba}
(umask 077 && mkdir -p "$NUMBA_CACHE_DIR") 2>/dev/null # numba would let the group write to the model cache

# Nothing is written to this pipe: reading from it with a timeout sleeps without starting a process. `wait -n`
# would wake at the end of a child and at a signal, but a signal at the wrong moment makes it miss both.
(ignore_stops && exec mkfifo "$run_dir/idle") && exec 9<>"$run_dir/idle" || {
    end_if_stopped
    exit 1
}
pause() { read -r -t "$1" -u 9; }

# Sets `now`, in milliseconds, without starting a process. Unlike bash's own clock, this one is never set: many a
# machine gets the time of day while the server starts.
clock() {
    local uptime rest
    read -r uptime rest </proc/uptime
    now=$((10#${uptime/./} * 10)) # it has hundredths of a second
}
clock
boot_deadline=$((now + startup_timeout_ms))

set -m # a process group for each child: Ctrl-C reaches only this script, which ends them in order
exec 8>&2 2>/dev/null # bash's own messages about ended children stay out of the log, which is 8
"$python" "$here/worker.py" 2>&8 8>&- 9<&- &
worker=$!
# One heap per thread would keep the memory of each thread's largest request. Free memory goes back early.
MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-2} MALLOC_TRIM_THRESHOLD_=131072 \
    "$python" "$here/web.py" 2>&8 8>&- 9<&- &
web=$!

running() { kill -0 "$1"; }

# Waits until the process $1 has ended, for $2 milliseconds, or for more than $3 signals to stop.
wait_for() {
    local until
    clock
    until=$((now + $2))
    while running "$1" && [ "$now" -lt "$until" ] && [ "$stops" -le "${3:-$stops}" ]; do
        pause 0.05
        clock
    done
}

# Logs a line in the format of the other processes; LEVEL MESSAGE.
log() {
    local time
    [ "$1" = ERROR ] || [ "$log_level" = info ] || [ "$log_level" = debug ] || return
    time=$(date -u +%FT%T.%3NZ)
    if [ "$json_output" = True ]; then
        printf '{"timestamp": "%s", "level": "%s", "target": "entrypoint", "fields": {"message": "%s"}}\n' \
            "$time" "$1" "$2"
    elif [ "$1" = ERROR ]; then
        echo "error: $2"
    else
        printf '%s %-5s entrypoint: %s\n' "$time" "$1" "$2"
    fi >&8
}

# Kills what is left of the run and exits with the code $1.
finish() {
    kill -KILL -- "-$worker" "-$web"
    wait
    exit "$1"
}

while running "$worker" && running "$web" && [ "$stops" -eq 0 ] && [ ! -e "$run_dir/stuck" ]; do
    clock
    if [ "$now" -ge "$boot_deadline" ] && [ ! -e "$run_dir/ready" ]; then
        log ERROR "the model was not ready within --startup-timeout (STARTUP_TIMEOUT) $startup_timeout s"
        finish 1
    fi
    pause 0.1
done

if [ "$stops" -gt 0 ] && [ ! -e "$run_dir/ready" ]; then
    # No request runs yet; and bash as well as gunicorn lose signals to processes that they have just started.
    log INFO "Stopped"
    finish 0
elif [ "$stops" -gt 0 ]; then
    # The worker finishes its running requests and ends; the API server processes answer new ones with 503. At the
    # deadline, or after another signal to stop, a second SIGTERM ends the worker at once, and its running
    # requests with an error.
    grace=$graceful_termination_timeout
    log INFO "Stopping; running requests have $grace s to finish, a second signal ends them"
    clock
    deadline=$((now + graceful_termination_timeout_ms))
    kill -TERM "$worker"
    wait_for "$worker" "$graceful_termination_timeout_ms" 1
    for _ in {1..10}; do # two signals at once are one to the worker
        running "$worker" || break
        kill -TERM "$worker"
        wait_for "$worker" 500
    done
    kill -KILL -- "-$worker" # if it still runs; the API server processes then answer open requests with an error
    kill -TERM "$web" # which lets clients read open responses to their end
    clock
    wait_for "$web" $((deadline - now - 2000)) 1
    wait_for "$web" 2000
    log INFO "Stopped"
    finish 0
fi

if [ -e "$run_dir/stuck" ]; then
    log ERROR "the worker was stuck for longer than --stuck-timeout (STUCK_TIMEOUT) $stuck_timeout s"
    kill -KILL -- "-$worker"
    kill -TERM "$web" # which still sends the errors to open requests
    wait_for "$web" 2000
    finish 1
elif ! running "$worker"; then
    wait "$worker"
    code=$?
    [ "$code" -eq 2 ] || log ERROR "the worker process ended with code $code"
    kill -TERM "$web" # which still sends the errors to open requests
    wait_for "$web" 2000
else
    wait "$web"
    code=$?
    [ "$code" -eq 2 ] || log ERROR "the API server ended with code $code"
fi
[ "$code" -eq 2 ] || code=1
finish "$code"
