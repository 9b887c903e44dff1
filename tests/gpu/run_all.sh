#!/bin/bash
# Everything here in sequence, each item with a time limit; a table of item, outcome and seconds last.
# Usage: tests/gpu/run_all.sh OUT SECONDS [RANKS ...]     (ranks: 2 4 by default; CPU=1 proves the scripts without GPUs)
# OUT gets parity.log, stress.log, cases.log, rings.log, trainer.log, failures.log, sanitizer.log and table.txt. ITEMS="stress cases" runs only those.
out=${1:?where to write}; budget=${2:?seconds for everything}; shift 2
ranks=${*:-2 4}
here=$(dirname "$(realpath "$0")"); python=${PYTHON:-python}; items=" ${ITEMS:-parity stress cases rings groups trainer failures sanitizer} "
cpu=${CPU:+--cpu}; begun=$SECONDS
mkdir -p "$out"; : >"$out/table.txt"
export PYTHONPATH=$(realpath "$here/../..")${PYTHONPATH:+:$PYTHONPATH}

item() {  # NAME LOG SECONDS COMMAND...
    local name=$1 log=$out/$2 limit=$3 start=$SECONDS left=$((budget - (SECONDS - begun) - 15)) code outcome
    shift 3
    [ $left -lt $limit ] && limit=$left
    if [ $limit -lt 15 ]; then
        printf '%-44s %-8s %5s\n' "$name" "no time" - | tee -a "$out/table.txt"
        return
    fi
    printf '\n==== %s: %s\n' "$name" "$*" >>"$log"
    timeout -k 15 "$limit" "${@//@BUDGET@/$((limit - 14))}" >>"$log" 2>&1 </dev/null  # scripts end in time, and say where they were
    code=$?
    case $code in 0) outcome=passed ;; 124 | 137) outcome=timeout ;; *) outcome=failed ;; esac
    [ $outcome = passed ] && tail -n 3 "$log" | grep -q '^skipped' && outcome=skipped
    printf '%-44s %-8s %5d\n' "$name" "$outcome" $((SECONDS - start)) | tee -a "$out/table.txt"
}
run() {  # RANKS SCRIPT ARGUMENTS...
    echo "$python -m torch.distributed.run --standalone --nproc-per-node=$1 $here/$2 ${*:3}"
}
wanted() { [[ $items == *" $1 "* ]]; }

for n in $ranks; do
    # $(run ...) and $cpu are to be split into words
    wanted parity && [ -z "$cpu" ] && item "parity, $n ranks" parity.log 240 $(run "$n" rank_parity.py @BUDGET@)
    wanted stress && item "500 disturbed steps, $n ranks" stress.log 300 $(run "$n" rank_stress.py $cpu --steps "${STEPS:-500}" \
        --progress --budget @BUDGET@ --limit 140)
    wanted stress && item "synchronize in every step, $n ranks" stress.log 120 $(run "$n" rank_stress.py $cpu --steps 60 \
        --always-sync --progress --budget @BUDGET@)
    wanted cases && item "cases, $n ranks" cases.log 300 $(run "$n" rank_cases.py $cpu --budget @BUDGET@)
    if wanted cases && [ -z "$cpu" ]; then
        item "cases, $n ranks, CUDA_LAUNCH_BLOCKING=1" cases.log 120 env CUDA_LAUNCH_BLOCKING=1 \
            $(run "$n" rank_cases.py --budget @BUDGET@ accumulate clip_v1 save_load two_engines)
        item "cases, $n ranks, Python's loop" cases.log 120 env DEEPSPEED_CDP_NATIVE=0 \
            $(run "$n" rank_cases.py --budget @BUDGET@ accumulate clip_v1 save_load two_engines)
        item "cases, $n ranks, one hardware queue" cases.log 120 env CUDA_DEVICE_MAX_CONNECTIONS=1 \
            $(run "$n" rank_cases.py --budget @BUDGET@ accumulate clip_v1 save_load two_engines)
    fi
    if wanted rings && [ "$n" = 4 ]; then
        for transport in $([ -n "$cpu" ] && echo auto || echo peer nccl); do
            item "rings of 2, $n ranks, $transport" rings.log 200 $(run "$n" rank_rings.py $cpu --transport $transport --budget @BUDGET@)
        done
    fi
    for transport in $(wanted groups && { [ -n "$cpu" ] && echo auto || echo peer nccl; }); do
        item "groups, experts, $n ranks, $transport" rings.log 200 $(run "$n" rank_groups.py $cpu --transport $transport --budget @BUDGET@)
    done
    wanted trainer && item "Trainer, $n ranks" trainer.log 300 "$python" "$here/trainer_runs.py" $cpu --ranks "$n" \
        $([ "$n" = 4 ] && echo ${cpu:+tensor} || echo plain)
    wanted failures && item "failures, $n ranks" failures.log 330 "$python" "$here/rank_failures.py" $cpu --ranks "$n" --budget @BUDGET@
    if wanted failures && [ -z "$cpu" ]; then
        for reads in synchronize empty none; do
            item "failures, $n ranks, $reads" failures.log 150 "$python" "$here/rank_failures.py" --ranks "$n" --reads $reads \
                --budget @BUDGET@ killed raises
        done
    fi
done
wanted sanitizer && [ -z "$cpu" ] && item "memcheck, 2 ranks" sanitizer.log 330 "$here/sanitize.sh" "$out/sanitizer.log.full"
[ -f "$out/sanitizer.log.full" ] && { tail -c 20000 "$out/sanitizer.log.full" >>"$out/sanitizer.log"; rm "$out/sanitizer.log.full"; }
echo; cat "$out/table.txt"
! grep -qE ' (failed|timeout|no time) ' "$out/table.txt"
