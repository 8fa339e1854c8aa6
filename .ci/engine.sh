#!/bin/bash
# engine.sh start|stop|status DIR: a private Docker engine, all of it under DIR, for the integration tests.
#
# `start` installs the engine from the Debian archive where it is missing (root), waits until it answers and prints
# one line, DOCKER_HOST=unix://DIR/docker.sock. `stop` ends exactly that engine, by the pid in its own pid file.
# Neither bridge nor iptables: a second engine with default networking would take docker0 away from a first one.
# Containers then have the loopback interface only, or the host's network. DOCKERD_ARGS replaces these two flags.
set -euo pipefail

verb=${1:?usage: engine.sh start|stop|status DIR}
dir=$(realpath -m "${2:?usage: engine.sh start|stop|status DIR}")
pidfile=$dir/docker.pid
socket=$dir/docker.sock
log=$dir/dockerd.log

ended() { # a zombie has ended; whether anybody reaps it is not ours to know
  [ ! -d "/proc/$1" ] || grep -qs '^State:[[:space:]]*Z' "/proc/$1/status"
}

ours() { # prints the pid only if the pid file names a live dockerd that was started with this very pid file
  local pid
  pid=$(cat "$pidfile" 2>/dev/null) && [ -n "$pid" ] && ! ended "$pid" || return 1
  tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -qxF -- "$pidfile" || return 1
  echo "$pid"
}

answers() { curl -fsS -m 2 --unix-socket "$socket" http://engine/_ping >/dev/null 2>&1; }

install_engine() {
  if command -v dockerd iptables curl docker-registry busybox | wc -l | grep -qx 5; then return; fi
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
    docker.io containerd runc iptables curl docker-registry busybox-static
}

start() {
  install_engine >&2
  mkdir -p "$dir"
  local child='' stale
  if ! ours >/dev/null; then
    rm -f "$pidfile" "$socket"
    # After a SIGKILL the engine's containerd may be an unreaped zombie that dockerd would wait for, in vain.
    stale=$(cat "$dir/exec/containerd/containerd.pid" 2>/dev/null || true)
    if [ -n "$stale" ] && ended "$stale"; then rm -f "$dir/exec/containerd/containerd.pid"; fi
    [ -e "$dir/daemon.json" ] || echo '{}' >"$dir/daemon.json" # or the machine's own would be read
    read -ra extra <<<"${DOCKERD_ARGS:---bridge=none --iptables=false}"
    setsid dockerd --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$pidfile" --host "unix://$socket" \
      --config-file "$dir/daemon.json" "${extra[@]}" >>"$log" 2>&1 </dev/null &
    child=$!
  fi
  for _ in $(seq 300); do
    if answers; then
      echo "DOCKER_HOST=unix://$socket"
      return
    fi
    if [ -n "$child" ] && ended "$child"; then break; fi
    sleep 0.1
  done
  echo "engine.sh: dockerd does not answer; the last lines of $log:" >&2
  tail -n 5 "$log" >&2
  exit 1
}

stop() {
  local pid
  if pid=$(ours); then
    kill -TERM "$pid"
    for _ in $(seq 300); do
      if ended "$pid"; then break; fi
      sleep 0.1
    done
    if ! ended "$pid"; then
      echo "engine.sh: dockerd $pid does not end" >&2
      exit 1
    fi
  fi
  if mountpoint -q "$dir/data"; then umount "$dir/data"; fi # a SIGKILL leaves it mounted on itself
}

case $verb in
start) start ;;
stop) stop ;;
status) if pid=$(ours) && answers; then echo "up, pid $pid"; else
  echo down
  exit 3
fi ;;
*)
  echo "engine.sh: unknown verb $verb (start, stop, status)" >&2
  exit 2
  ;;
esac
