#!/usr/bin/env bash
# One command for a machine with one NVIDIA GPU and no network, in less than nine minutes; see README.md beside this file.
#
#     benchmarks/gpu/run.sh [OUT] [--parts NAME,...] [--wheels DIR] [--python PROGRAM] [--device NAME] [--sizes N,N,...]
#         [--quick]
#
# OUT       folder for everything; not given: benchmarks/gpu/results
# --parts   of tests, attention, steps, methods, sampled, batches, quantised; not given: all but sampled and batches,
#           for which there is no time beside the others
# --wheels  folder of .whl files of what the machine's Python lacks
# --python  not given: python3
# --device  not given: cuda; with cpu the script itself can be tried
# --sizes   parameters of the models; not given: 1e9,7e9
# --quick   a few tokens, only to see that everything runs
#
# Exit code 0: done. 1: a test failed, an output differs, or time was over too early. 2: something is missing.
set -euo pipefail

TOTAL_S=510 TESTS_S=150 ATTENTION_S=60 STEPS_S=60 QUANTISED_S=45 GRACE_S=20 LEAST_S=20
METHODS=hf,hf-prompt-lookup,plain,jacobi,lookahead,lookahead=15,5,15,adaptive,adaptive-warm
SAMPLED_METHODS=hf,plain,adaptive,adaptive-warm TEMPERATURE=0.7 BATCH=8
PARTS=tests,attention,steps,methods,sampled,batches,quantised

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$PWD called_from=$OLDPWD
out=benchmarks/gpu/results wheels='' python=python3 device=cuda sizes=1e9,7e9
parts=tests,attention,steps,methods,quantised dtype=bfloat16 failed=0
bench=(--limit 12 --max-new-tokens 128) tests=() attention=() steps=() quantised=() rounds=3

absolute() { case $1 in /*) echo "$1" ;; *) echo "$called_from/$1" ;; esac; }

refuse() {
    echo "$1" >&2
    exit 2
}

while (($#)); do
    case $1 in
        --quick)
            bench=(--limit 2 --max-new-tokens 6) rounds=1 tests=(-k 'greedy and llama') steps=(--rounds 2) quantised=(--rounds 1)
            attention=(--shapes 4x2x32 --lengths 16,64 --steps 1,8 --rounds 2 --no-flex)
            ;;
        --parts | --wheels | --python | --device | --sizes)
            (($# > 1)) || refuse "$1 needs a value"
            printf -v "${1#--}" %s "$2"
            shift
            ;;
        -*) refuse "no option $1: see the head of $root/benchmarks/gpu/run.sh" ;;
        *) out=$(absolute "$1") ;;
    esac
    shift
done

wanted() { [[ ,$parts, == *,$1,* ]]; }
for part in ${parts//,/ }; do
    [[ ,$PARTS, == *,$part,* ]] || refuse "no part $part: give some of $PARTS as --parts"
done
case $python in */*) python=$(absolute "$python") ;; esac

# Packages that came as wheels go before those of the machine; nothing is installed for good.
export PYTHONPATH=$root PYTHONUNBUFFERED=1
if [[ $wheels ]]; then
    wheels=$(absolute "$wheels")
    compgen -G "$wheels/*.whl" >/dev/null || refuse "no .whl files in $wheels"
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
    PYTHONPATH=$site:$root
fi
"$python" - "$device" <<'PYTHON' || refuse 'not begun'
import re, sys, tomllib
from importlib.metadata import PackageNotFoundError, version

with open("pyproject.toml", "rb") as file:
    wanted = [re.match(r"[\w-]+", each)[0] for each in tomllib.load(file)["project"]["dependencies"]]
missing = []
for name in [*wanted, "matplotlib", "pytest", "pytest-timeout", "hypothesis"]:
    try:
        print(f"{name} {version(name)}", end="; ")
    except PackageNotFoundError:
        missing.append(name)
print(f"Python {sys.version.split()[0]}")
if missing:
    sys.exit(f"this Python lacks {', '.join(missing)}: give a folder with wheels of them as --wheels")
import torch

if sys.argv[1].startswith("cuda") and not torch.cuda.is_available():
    sys.exit("torch sees no GPU: give --device cpu to try the script without one")
PYTHON

# stage NAME LIMIT COMMAND...: at most LIMIT seconds; then it is interrupted as by Ctrl-C, and saves what it has.
stage() {
    local name=$1 limit=$2 code=0
    shift 2
    ((limit <= TOTAL_S - SECONDS)) || limit=$((TOTAL_S - SECONDS))
    if ((limit < LEAST_S)); then
        echo "== $name: no time left"
        failed=1
        return
    fi
    echo "== $name: at most $limit s"
    env --default-signal=INT timeout --foreground --signal=INT --kill-after=$GRACE_S "$limit" "$@" || code=$?
    echo "== $name: exit code $code, $SECONDS of $TOTAL_S s gone"
    ((code == 0)) || failed=1
}

label() { awk -v n="$1" 'BEGIN { if (n < 1e9) printf "%gM", n / 1e6; else printf "%gB", n / 1e9 }'; }

mkdir -p "$out"
run_tests() { # other plugins and versions than the project's may be there: they and their warnings are no errors here
    local files chosen='gpu and not slow'
    [[ $device != cpu ]] || chosen='not gpu and not slow'
    mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
    PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 stage 'parity tests' $TESTS_S "$python" -m pytest -m "$chosen" -p pytest_timeout \
        -p no:cacheprovider -W default "${tests[@]}" "${files[@]}"
}
if wanted tests; then
    run_tests 2>&1 | tee "$out/tests.log"
    grep -qE '== parity tests: exit code 0,' "$out/tests.log" || failed=1
    grep -E '^[0-9]+ (passed|failed|skipped)|, [0-9]+ passed' "$out/tests.log" | tail -n 1 >"$out/parity.txt" || true
fi

! wanted attention || stage attention $ATTENTION_S "$python" benchmarks/gpu/attention.py --out "$out" \
    --device "$device" --limit-s $((ATTENTION_S - 15)) "${attention[@]}"

# What is left of the time is shared by the parts that take as long as they are given.
IFS=, read -ra todo <<<"$sizes"
long=0
for part in methods sampled batches; do ! wanted $part || long=$((long + ${#todo[@]})); done
kept_s=$(wanted quantised && echo $QUANTISED_S || echo 0)
run_long() { # NAME COMMAND...
    local share=$(((TOTAL_S - kept_s - SECONDS) / long))
    long=$((long - 1))
    stage "$1" "$share" "${@:2}"
}

for size in "${todo[@]}"; do
    name=$(label "$size")
    model=(--inflate "$size" --dtype $dtype --device "$device")
    lade_bench=("$python" -m lade bench "${model[@]}" --no-pack "${bench[@]}" --allow-near-ties --resume)
    ! wanted steps || stage "steps of $name parameters" $STEPS_S "$python" benchmarks/gpu/steps.py --params "$size" \
        --dtype $dtype --device "$device" "${steps[@]}" --out "$out/steps-$name.json"
    ! wanted methods || run_long "$name parameters" "${lade_bench[@]}" --methods $METHODS --out "$out/$name"
    ! wanted sampled || run_long "$name parameters, sampled" "${lade_bench[@]}" --methods $SAMPLED_METHODS \
        --temperature $TEMPERATURE --out "$out/$name-sampled"
    ! wanted batches || run_long "$name parameters, batches of $BATCH" \
        env COLUMNS=120 bash -c '"${@:2}" >"$1"' - "$out/batches-$name.txt" "$python" -m lade bench "${model[@]}" --no-pack \
        --batch-size $BATCH "${bench[@]}" --repeats $rounds --allow-near-ties
done

! wanted quantised || stage "quantised weights, $name parameters" $QUANTISED_S "$python" benchmarks/gpu/quantised.py \
    --params "$size" --device "$device" --limit-s $((QUANTISED_S - 20)) "${quantised[@]}" --out "$out/quantised.json"

tar --create --gzip --file "$out.tar.gz" --directory "$out" .
echo "== everything is in $out, and in $out.tar.gz to carry away"
if [[ $out == benchmarks/gpu/results ]]; then
    "$python" benchmarks/summarize.py
fi
exit $failed
