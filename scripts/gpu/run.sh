#!/usr/bin/env bash
# What to run first on one GPU: docs/gpu.md. Steps are independent, most valuable first; each has a
# limit of its own, and none begins when less time than it needs is left. Results are written to $OUT
# at once. Without a network, .whl holds the wheels and .gpu/specs the frozen points of prepare.sh.
#   S=480 bash scripts/gpu/run.sh            the whole plan
#   ONLY="env one" bash scripts/gpu/run.sh   parts of it
# On a CPU, with the points of specs.py --small, it is rehearsed: DS_ACCELERATOR=cpu GPU_READY_SMALL=1
set -u
main() { # read as a whole before it runs
cd "$(dirname "$0")/../.." || exit 1
export OUT=${OUT:-/tmp/gpu_ready_out}; mkdir -p "$OUT/specs"; tmp=${TMPDIR:-/tmp}
end=$(($(date +%s) + ${S:-480}))
left() { echo $((end - $(date +%s))); }
say() { echo "[$(date +%T)] left $(left) s: $*" | tee -a "$OUT/steps.log"; }
say install
if [ -d .whl ]; then # what prepare.sh has brought
    export PYTHONPATH=$tmp/site
    [ -e "$tmp/site/.done" ] || python3 -m pip install -q --no-index --no-deps --no-compile \
        --no-cache-dir --upgrade --target "$tmp/site" .whl/*.whl 2>&1 | tail -5
    touch "$tmp/site/.done"
fi
export PYTHONPATH="$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 GPU_READY_LOCK=$tmp/gpu_ready.lock
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 DS_ACCELERATOR=${DS_ACCELERATOR:-cuda}
export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TRITON_CACHE_DIR=/tmp/triton_cache HF_HUB_OFFLINE=1
export CUDA_DEVICE_MAX_CONNECTIONS=32 # Megatron-Core's own ranks set 1
specs=${SPECS:-.gpu/specs} tools=scripts/gpu
for file in "$specs"/*.json; do [[ $file == *.smoke.json ]] || cp "$file" "$OUT/specs/"; done
step() { # step NAME NEEDS_S LIMIT_S COMMAND...
    local name=$1 needs=$2 limit=$3; shift 3
    if [ -n "${ONLY:-}" ] && [[ " $ONLY " != *" ${name%%.*} "* ]]; then return; fi
    local now; now=$(left)
    if [ "$now" -lt "$needs" ]; then say "skip $name"; return; fi
    [ "$limit" -lt "$now" ] || limit=$now
    say "begin $name (limit $limit s)"
    timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1
    local code=$?
    say "end $name: $code"
    [ "$code" = 0 ] || { echo "-- $name"; tail -n 12 "$OUT/$name.log"; } >>"$OUT/failed.txt"
}
# 1. What the machine is; what CUDA takes of its memory, with kernels loaded at once and lazily.
step env 10 75 python3 "$tools/env.py"
# 2. Whole runs on one rank, gate included, all contenders at once; then what is timed below, with
#    two blocks, which shows what fails and fills the compiler's caches.
{ for name in zeropp_fp32 zeropp_bf16 zeropp_llama_bf16 zeropp_recompute_bf16 zeropp_compiled_bf16 \
    torch_pp_bf16 fsdp_bf16 deepspeed_3d_bf16 megatron_bf16; do
    echo "python3 $tools/many.py $specs/many/one_$name.json $tmp/many/one_$name 75"
done; } >$tmp/one.list
{ for name in a_zeropp a_fsdp a_megatron a_deepspeed; do
    echo "timeout 80 python3 $tools/lone.py --smoke $specs $name.smoke"
done; } >$tmp/smoke.list
step one 40 ${LONG:-80} xargs -d '\n' -P 16 -n 1 bash -c -- <$tmp/one.list &
step smoke 30 ${LONG:-85} xargs -d '\n' -P 4 -n 1 bash -c -- <$tmp/smoke.list
wait
# 3. The verdict's cell: all contenders' best plans, and the engine without torch.compile.
step lone_a1 30 ${LONG:-45} python3 "$tools/lone.py" "$specs" a_zeropp
step lone_a2 30 ${LONG:-55} bash -c "python3 $tools/lone.py $specs a_megatron || python3 $tools/lone.py $specs a_megatron_b2"
step lone_a3 30 ${LONG:-45} python3 "$tools/lone.py" "$specs" a_deepspeed
step lone_a4 30 ${LONG:-45} python3 "$tools/lone.py" "$specs" a_fsdp
# 4. The same cell at equal degrees, where the claim comes from: TP 8 against ZeRO-3 of 8.
step lone_e1 30 ${LONG:-50} python3 "$tools/lone.py" "$specs" e_zeropp e_zeropp_unsplit
step lone_e2 25 ${LONG:-45} python3 "$tools/lone.py" "$specs" e_megatron
step lone_e3 25 ${LONG:-45} python3 "$tools/lone.py" "$specs" e_deepspeed
step lone_l1 30 ${LONG:-45} python3 "$tools/lone.py" "$specs" l_zeropp
step lone_l2 30 ${LONG:-45} python3 "$tools/lone.py" "$specs" l_fsdp
step lone_l3 30 ${LONG:-45} python3 "$tools/lone.py" "$specs" l_megatron
# Activations in the host's memory: the link, then ranks that send them and ranks that recompute.
step offload 20 40 python3 "$tools/link.py"
step offload.8b 40 ${LONG:-70} python3 "$tools/lone.py" "$specs" o_8b_sent o_8b_recomputed
step offload.70b 80 ${LONG:-150} python3 "$tools/lone.py" "$specs" o_70b_sent o_70b_recomputed
# 5. Kernels beside the cost model.
step prices 30 90 python3 "$tools/prices.py"
# 6. What people run, eager: Hugging Face's Llama, plain, under FSDP2 and under DeepSpeed.
{ for name in eager deepspeed_zero3 fsdp2 deepspeed_zero2 compiled deepspeed_zero1 eager_foreach; do
    echo "timeout 60 python3 $tools/hf.py $name"
done; } >$tmp/hf.list
step hf 40 ${LONG:-100} xargs -d '\n' -P 2 -n 1 bash -c -- <$tmp/hf.list
# 7. Four ranks of the engine on the one GPU over real NCCL.
step four1 45 ${LONG:-75} python3 "$tools/many.py" "$specs/many/four_zeropp_bf16.json" $tmp/many/four_zeropp_bf16 70
# 8. What compute loses beside copies.
step overlap 20 45 python3 "$tools/overlap.py"
# 9. What is left.
step queues 15 30 python3 "$tools/queues.py"
step four2 45 ${LONG:-70} python3 "$tools/many.py" "$specs/many/four_zeropp_replicas_fp32.json" $tmp/many/four_zeropp_replicas_fp32 65
step lone_b1 30 ${LONG:-45} python3 "$tools/lone.py" "$specs" b_zeropp
step lone_b2 30 ${LONG:-45} python3 "$tools/lone.py" "$specs" b_torch_pp
step lone_e4 30 ${LONG:-60} python3 "$tools/lone.py" "$specs" e_zeropp_compiled e_zeropp_recompute
step calibrate 25 60 bash -c "python3 -m benchmarks.calibrate --name one_gpu --like h100 && cp conf/cluster/one_gpu.yaml results/reports/calibrate_one_gpu.md $OUT/"
step four3 45 ${LONG:-70} python3 "$tools/many.py" "$specs/many/four_deepspeed_3d_bf16.json" $tmp/many/four_deepspeed_3d_bf16 65
step suite 30 ${LONG:-60} python3 -m benchmarks.run -m model=gpt_tiny num_gpus=1 cluster=h100 precision=bf16 \
    data=synthetic microbatch_size=2 sequences_per_gpu=4 contender=zeropp measure.steps=2 \
    runs_dir=$tmp/many/suite report_dir=$tmp/many/report
step overhead 25 60 python3 "$tools/overhead.py" --out "$OUT/engine_overhead.json"

say pack
find $tmp/many -name 'rank_*.log' -size +200k -delete 2>/dev/null
rm -rf $tmp/many/.one_process $tmp/many/*/.one_process; mkdir -p $tmp/pack && cp -r $tmp/many $tmp/pack/ 2>/dev/null
(cd "$OUT" && { tail -n 60 failed.txt 2>/dev/null; COLUMNS=150 python3 -m benchmarks.report . --out report; } 2>&1 | tee summary.txt)
(cd "$OUT" && tar czf $tmp/all.tar.gz --exclude='*.trace.json.gz' --exclude=.one_process --exclude='*.pt' . -C $tmp/pack . 2>/dev/null; ls -S ./*.trace.json.gz 2>/dev/null | tail -2 | sed 's#^./##' >$tmp/keep)
mv $tmp/all.tar.gz "$OUT/all.tar.gz"
[ -n "${PACK:-}" ] && for file in "$OUT"/*; do # where few and small files can be fetched
    name=$(basename "$file")
    case "$name" in all.tar.gz | summary.txt | steps.log | env.json | prices.json | overlap.json) ;;
    *.trace.json.gz) grep -qx "$name" $tmp/keep && [ "$(stat -c %s "$file")" -lt 16000000 ] || rm -rf "$file" ;;
    *) rm -rf "$file" ;;
    esac
done
ls -la "$OUT"
say done
}
main
exit
