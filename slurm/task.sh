#!/bin/bash
# What every task of a step runs on its node: COMMAND in an environment of its own, its end recorded, nothing left.
#
#   task.sh EXITS COMMAND...     EXITS: a folder that gets a file with this task's exit code, its node and the time
#
# lib.sh starts it, and exports LOCAL_TMP, RESTART, VENV, SETUP and KILL_WAIT.

set -uo pipefail
exits=$1
shift

record() { # the exit code of this task, its node, and the time in nanoseconds: the first failure decides
    echo "$1 $SLURMD_NODENAME $(date +%s%N)" >"$exits/.$SLURM_PROCID"
    mv "$exits/.$SLURM_PROCID" "$exits/$SLURM_PROCID"
}

leave_scratch() { # the last task of the node takes the folder away; of a run that is over, its copies too
    rmdir "$scratch/tasks/$SLURM_PROCID" 2>/dev/null
    rmdir "$scratch/tasks" 2>/dev/null && rm -rf "$scratch"
    [[ ${code:-1} != 0 && ! -e $exits/.over ]] || rm -rf "${VAPO_HOST_MEMORY:-}"
}

killed_for_memory() { # in words, where the kernel has killed a process of this step for want of memory
    local root=${CGROUP_ROOT:-/sys/fs/cgroup} folder events peak
    for folder in "$root$(sed -n 's/^0:://p' /proc/self/cgroup)" "$root/memory$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)"; do
        events=$(cat "$folder/memory.events" "$folder/memory.oom_control" 2>/dev/null)
        [[ $(awk '$1 == "oom_kill" { print $2 }' <<<"$events") -gt 0 ]] || continue
        peak=$(cat "$folder/memory.peak" "$folder/memory.max_usage_in_bytes" 2>/dev/null | head -n 1)
        echo ": the system killed a process of this step for want of memory${peak:+, which held up to $((peak >> 20)) MiB}"
        return
    done
}

refuse() { # CODE MESSAGE
    trap - EXIT
    echo "task.sh: $2" >&2
    record "$1"
    leave_scratch
    exit "$1"
}

# ── an environment of its own ──────────────────────────────────────────────────────────────────────────────────────

# One folder a node and try; earlier tries of this job may have left theirs on this node.
scratch=$LOCAL_TMP/vapo-$SLURM_JOB_ID.$RESTART.$SLURM_NODEID
copies=${SHARED_MEMORY:-/dev/shm}/vapo-job-$SLURM_JOB_ID
for old in "$LOCAL_TMP/vapo-$SLURM_JOB_ID".* "$copies".*; do
    try=${old#*"-$SLURM_JOB_ID."}
    try=${try%%.*}
    # This node may have had another number in them.
    [[ ! $try =~ ^[0-9]+$ || $try -ge $RESTART || ! -O $old ]] || rm -rf "$old"
done
(umask 077 && mkdir -p "$scratch/tmp" "$scratch/tasks/$SLURM_PROCID")
# A disk that is full, broken or not there: 76, as of a broken device, has the node left out.
[[ -O $scratch && -w $scratch/tmp && -d $scratch/tasks/$SLURM_PROCID ]] ||
    refuse 76 "$scratch on $SLURMD_NODENAME cannot be made or belongs to somebody else; if so on every node, set LOCAL_TMP"
# Copies of a run's state (checkpoint/host_memory.py): they stay for the next attempt of this job's step.
export VAPO_HOST_MEMORY=$copies.$RESTART.$SLURMD_NODENAME
export TMPDIR=$scratch/tmp
export XDG_CACHE_HOME=$scratch/cache
# Downloaded models are kept where the user keeps them, if they say where.
export HF_HOME=${HF_HOME:-$scratch/cache/huggingface}

# Files that activate or set up an environment need not be written for `set -u`.
set +u
trap : USR1 # a plain `scancel --signal=USR1` reaches the rank by itself, and this shell too
trap 'trap - EXIT; leave_scratch; exit 143' TERM
if [[ -n $SETUP ]]; then
    failed="SETUP=$SETUP on $SLURMD_NODENAME failed: its last command must end with 0"
    trap 'refuse 2 "$failed"' EXIT # it may call exit
    source "$SETUP" || refuse 2 "$failed"
    trap - EXIT
fi
if [[ -n $VENV ]]; then
    # The job's first node has it, or the job would not have begun.
    source "$VENV/bin/activate" || refuse 76 "VENV=$VENV cannot be used on $SLURMD_NODENAME"
fi
# Compiled kernels stay on the node for later tries and jobs, one folder for each environment that they belong to.
caches=$LOCAL_TMP/vapo-kernels-$UID
packages='import hashlib, importlib.metadata as m, sys
names = sorted(f"{d.name} {d.version}" for d in m.distributions())
print(hashlib.sha256("\n".join([sys.version, *names]).encode()).hexdigest()[:16])'
cache=$caches/$(python3 -c "$packages" 2>/dev/null || echo unknown)
(umask 077 && mkdir -p "$cache" && touch "$cache") 2>/dev/null
# Somebody else's folder of that name is not used; what no try has used for a month goes.
[[ -O $caches && -w $cache ]] || cache=$scratch/cache
find "$caches" -mindepth 1 -maxdepth 1 -mtime +30 -exec rm -rf {} + 2>/dev/null
export TRITON_CACHE_DIR=$cache/triton
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor
export TORCH_EXTENSIONS_DIR=$cache/torch_extensions
export CUDA_CACHE_PATH=$cache/cuda
export FLASHINFER_WORKSPACE_BASE=$cache/flashinfer
export SGLANG_CACHE_DIR=$cache/sglang
export SGLANG_JIT_CACHE_DIR=$cache/sglang/jit
export TVM_FFI_CACHE_DIR=$cache/tvm-ffi
export DG_JIT_CACHE_DIR=$cache/deep_gemm
export TILELANG_CACHE_DIR=$cache/tilelang
export CUTE_DSL_CACHE_DIR=$cache/cute
set -u

# The cores of its GPU's half of the node, where there are halves: memory that a task writes first is then near, too.
# Rank 0's verifiers and each engine have them as well. A task that is alone on its node serves all GPUs, from all cores.
near_cores() {
    local bus node
    [[ ${SLURM_STEP_TASKS_PER_NODE:-1} != @(1|"1(x"*) ]] || return 1
    bus=$(nvidia-smi --id="${SLURM_LOCALID:-0}" --query-gpu=pci.bus_id --format=csv,noheader 2>/dev/null) || return 1
    bus=${bus,,} # 00000000:1B:00.0, in /sys 0000:1b:00.0
    node=$(cat "${SYS_ROOT:-/sys}/bus/pci/devices/${bus#0000}/numa_node" 2>/dev/null) || return 1
    [[ $node -lt 0 ]] || cat "${SYS_ROOT:-/sys}/devices/system/node/node$node/cpulist"
}
cores=$(near_cores) && [[ -n $cores ]] && taskset --pid --cpu-list "$cores" $$ >/dev/null 2>&1

# ── signals ────────────────────────────────────────────────────────────────────────────────────────────────────────

rank=
ending=
trap '[[ -z $rank ]] || kill -USR1 "$rank" 2>/dev/null' URG
trap on_term TERM

on_term() {
    # Slurm sent it to the rank too, and KILL follows after KILL_WAIT: this shell's too, so it cleans up before.
    [[ -z $ending ]] || return 0
    ending=1
    (
        trap '' TERM
        sleep $((KILL_WAIT > 4 ? KILL_WAIT - 3 : 1))
        rm -rf "$scratch"
        [[ ! -e $exits/.over ]] || rm -rf "$VAPO_HOST_MEMORY"
    ) </dev/null >/dev/null 2>&1 &
    cleaner=$!
    disown
}

# ── the command ────────────────────────────────────────────────────────────────────────────────────────────────────

# A process group of its own for each background job, so that it can be ended together with what it has left.
set -m
# USR1 is ignored until the program listens to it: one that comes while it is still starting must not kill it.
(
    trap '' USR1
    exec "$@"
) </dev/null &
rank=$!
looks=0 most_looks=64 # in a row, four a second, at which something other than a debugger (t) had the rank stopped
{
    while kill -0 "$rank"; do
        if [[ $(sed 's/.*) //' "/proc/$rank/stat") == T* ]]; then
            ((++looks < most_looks)) || kill -KILL "$rank"
            sleep 0.25 # no longer: a kill is recorded before srun ends this task because another one failed
        else
            [[ $looks -ge most_looks ]] || looks=0
            wait "$rank" # comes back for a trap too, and at once while the rank is stopped
        fi
    done
    wait "$rank"
    code=$?
    # Orphans of the rank hold its output open; Slurm would not notice that this task has ended.
    kill -KILL -- "-$rank"
    [[ -z $ending ]] || kill -KILL -- "-$cleaner"
} 2>/dev/null
# A task that was killed because another one failed says nothing about its node.
if [[ -z $ending || $code -lt 128 ]]; then
    why=$([[ $code != 137 ]] || killed_for_memory)
    [[ $looks -lt most_looks ]] || why=": a signal (SIGSTOP) had it stopped for good"
    [[ $code -lt 128 ]] || echo "task.sh: task $SLURM_PROCID on $SLURMD_NODENAME was ended by signal $((code - 128))$why" >&2
    record "$code"
fi
leave_scratch
exit "$code"
