#!/bin/bash
# slurm.sh start|stop|status DIR: a private Slurm of two nodes on this machine, all of it under DIR, for the tests.
#
# `start` installs Slurm and munge from the Debian archive where they are missing (root) and prints one line,
# SLURM_CONF=DIR/slurm.conf. Two slurmd, n1p16817 and n2p16817, each with SLURM_FAKE_GPUS (2) GPUs that are nodes of /dev/null;
# everything listens on 127.0.0.1 at SLURM_PORT (16817) and the two ports after it. DIR/bin/srun is a STAND-IN FOR PYXIS:
# see .ci/srun. `stop` ends exactly these daemons, by their own pid files; `stop DIR slurmctld` only the controller.
set -euo pipefail

verb=${1:?usage: slurm.sh start|stop|status DIR [DAEMON]}
dir=$(realpath -m "${2:?usage: slurm.sh start|stop|status DIR [DAEMON]}")
only=${3:-}
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
export SLURM_CONF=$dir/slurm.conf
port=${SLURM_PORT:-$(sed -n 's/^SlurmctldPort=//p' "$SLURM_CONF" 2>/dev/null || true)}
port=${port:-16817}
# a second cluster of this machine has another port, and so other names: Slurm's cgroups are named after nodes
n1=n1p$port n2=n2p$port
daemons=("slurmd-$n2" "slurmd-$n1" slurmctld munged)

pid_of() { # prints the pid only if DIR/<daemon>.pid names a live process of that program, not a zombie
  local pid
  pid=$(cat "$dir/$1.pid" 2>/dev/null) && [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "${1%%-*}" ] &&
    ! grep -qs '^State:[[:space:]]*Z' "/proc/$pid/status" && echo "$pid"
}

answers() { [ "$(timeout 5 sinfo -h -N -o %t 2>/dev/null | grep -cxE 'idle|mix|alloc|comp|drain|drng')" = 2 ]; }

own() { # only a folder that this script made, or may make: it writes, links and starts daemons in there
  [ -e "$dir/.e2e-slurm" ] || { [ -z "$(ls -A -- "$dir" 2>/dev/null)" ] && [ "$dir" != / ]; }
}

configure() {
  local mem
  mkdir -p "$dir"
  : >"$dir/.e2e-slurm"
  mkdir -p "$dir"/{state,log,bin} "$dir/$n1" "$dir/$n2"
  install -d -m 755 "$dir/munge" # munged refuses a folder that others may write to
  [ -e "$dir/munge/key" ] || install -m 400 <(head -c 1024 /dev/urandom) "$dir/munge/key"
  mem=$(awk '/MemTotal/{print int($2/2048)-512}' /proc/meminfo)
  cat >"$SLURM_CONF" <<CONF
ClusterName=e2e
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/sock
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=1
MpiDefault=none
ReturnToService=2
KillWait=2
SlurmdTimeout=10
MinJobAge=60
OverTimeLimit=0
GresTypes=gpu
NodeName=$n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=2 Boards=1 RealMemory=$mem Gres=gpu:fake:${SLURM_FAKE_GPUS:-2} State=UNKNOWN
NodeName=$n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=2 Boards=1 RealMemory=$mem Gres=gpu:fake:${SLURM_FAKE_GPUS:-2} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  printf '%s\n' CgroupPlugin=cgroup/v1 CgroupAutomount=yes CgroupMountpoint=/sys/fs/cgroup ConstrainRAMSpace=yes \
    ConstrainSwapSpace=no ConstrainCores=no >"$dir/cgroup.conf"
  : >"$dir/gres.conf"
  local i
  for ((i = 0; i < ${SLURM_FAKE_GPUS:-2}; i++)); do
    [ -e "$dir/gpu$i" ] || mknod "$dir/gpu$i" c 1 3
    echo "NodeName=$n1,$n2 Name=gpu Type=fake File=$dir/gpu$i" >>"$dir/gres.conf"
  done
  ln -sf "$here/srun" "$dir/bin/srun"
  # ray.sub asks `host` first for a node's address: the two nodes have none of their own
  # shellcheck disable=SC2016
  printf '#!/bin/bash\necho "$1 has address %s"\n' "$(hostname -I | awk '{print $1 ? $1 : "127.0.0.1"}')" >"$dir/bin/host"
  chmod +x "$dir/bin/host"
}

start() {
  if ! command -v slurmctld slurmd munged sbatch | wc -l | grep -qx 4; then
    apt-get update -q >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends slurm-wlm munge >&2
  fi
  configure
  pid_of munged >/dev/null || setsid munged --force --key-file "$dir/munge/key" --socket "$dir/munge/sock" \
    --pid-file "$dir/munged.pid" --log-file "$dir/log/munged.log" --seed-file "$dir/munge/seed"
  pid_of slurmctld >/dev/null || setsid slurmctld
  pid_of "slurmd-$n1" >/dev/null || setsid slurmd -N "$n1"
  pid_of "slurmd-$n2" >/dev/null || setsid slurmd -N "$n2"
  for _ in $(seq 300); do
    if answers; then
      echo "SLURM_CONF=$SLURM_CONF"
      return
    fi
    sleep 0.1
  done
  echo "slurm.sh: not two usable nodes within 30 s:" >&2
  { timeout 5 sinfo -N || true; tail -n 5 "$dir"/log/*.log; } >&2
  exit 1
}

stop() {
  local daemon pid
  for daemon in "${daemons[@]}"; do
    [ -z "$only" ] || [ "$only" = "$daemon" ] || continue
    pid=$(pid_of "$daemon") || continue
    kill "-${SIGNAL:-TERM}" "$pid"
    for _ in $(seq 150); do
      pid_of "$daemon" >/dev/null || break
      sleep 0.1
    done
    if pid_of "$daemon" >/dev/null; then
      echo "slurm.sh: $daemon $pid does not end" >&2
      exit 1
    fi
  done
}

if ! own; then
  echo "slurm.sh: $dir is neither empty nor a folder of this script: nothing was done" >&2
  exit 2
fi
case $verb in
start) start ;;
stop) stop ;;
status) if answers; then timeout 5 sinfo -h -N -o 'up %N %t %G'; else
  echo down
  exit 3
fi ;;
*)
  echo "slurm.sh: unknown verb $verb (start, stop, status)" >&2
  exit 2
  ;;
esac
