# Sourced by train.sbatch, after launch/environment.sh: runs the steps of a Slurm job, and requeues the job where the run
# can go on: after SIGUSR1 (the time limit is near), a preemption, or a lost node. Otherwise the job ends with the code of
# the step: a run that is finished, refused or failed is not started again.

JOB=${SLURM_JOB_ID:-0}
START=$((${SLURM_RESTART_COUNT:-0} + 1))
STARTS=$((${MAX_RESTARTS:-20} + 1))
LOST=.cache/slurm-$JOB.lost # a line for each time that a node was lost: its name

say() { echo "megarl: $*" >&2; }

# of_job NAME: what `scontrol show job` says of this job.
of_job() { scontrol show job "$JOB" --oneliner | grep -o "\b$1=[^ ]*" | cut -d= -f2; }

nodes() { scontrol show hostnames "$1" | sort; }

# nodes_lost: those that Slurm took off the job, or is about to.
nodes_lost() {
    local gone=(--noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=down,fail,no_respond --format=%N)
    { sinfo "${gone[@]}" && comm -23 <(nodes "$SLURM_JOB_NODELIST") <(nodes "$(of_job NodeList)"); } | sort -u
}
lost_twice() { sort "$LOST" | uniq -d; }

# node_here, node_still_here: if the node of this script is lost, nobody takes the line away again.
node_here() { { mkdir -p .cache && echo "${SLURMD_NODENAME:-none}" >>"$LOST"; } 2>/dev/null || LOST=/dev/null; }
node_still_here() { [[ ! -f $LOST ]] || sed -i '$d' "$LOST"; }
forget_losses() { [[ ! -f $LOST ]] || rm -f "$LOST"; } # it may be /dev/null

# requeue WHY: let Slurm start the job again, without the nodes that were lost twice.
requeue() {
    local excluded
    ((START < STARTS)) || fail "$1; the job was started $START times, and is not requeued (MAX_RESTARTS=$((STARTS - 1)))"
    say "$1; the job is requeued for start $((START + 1)) of at most $STARTS"
    trap '' TERM # which Slurm sends to all that runs in this script once the job is requeued
    scontrol requeue "$JOB" || exit "$CODE"
    excluded=$({ lost_twice; of_job ExcNodeList | tr , '\n' | sed '/(null)/d'; } | sort -u | paste -sd,)
    if [[ -n $excluded ]]; then
        say "left out from now on: $excluded"
        scontrol update JobId="$JOB" ExcNodeList="$excluded"
    fi
    exit 0
}

# begin_job: refuse a start too many, and leave a node that was lost twice.
begin_job() {
    local node
    CODE=1
    ((START <= STARTS)) || fail "start $START of job $JOB is one too many (MAX_RESTARTS=$((STARTS - 1)))"
    for node in $([[ ! -f $LOST ]] || lost_twice); do
        if nodes "$SLURM_JOB_NODELIST" | grep -qxF "$node"; then
            requeue "$node was lost twice"
        fi
    done
}

# run_step COMMAND...: returns if it ends with 0; otherwise requeues the job, or leaves with the step's code.
run_step() {
    local lost
    CODE=0
    node_here
    trap 'node_still_here; exit 143' TERM # the job is cancelled, or preempted without a time of grace
    "$@" &
    wait $! || CODE=$?
    node_still_here
    lost=$(nodes_lost)
    [[ -z $lost ]] || echo "$lost" >>"$LOST"
    if ((CODE == 0)); then
        return
    elif [[ -n $lost ]]; then
        requeue "the job lost ${lost//$'\n'/, }"
    elif ((CODE == 138)); then
        requeue "the run was stopped by SIGUSR1"
    elif ((CODE == 143)) && [[ $(of_job PreemptTime) == [0-9]* ]]; then
        requeue "the job is preempted"
    fi
    forget_losses
    exit "$CODE"
}
