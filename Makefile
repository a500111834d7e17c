# One command for each thing; `make help` lists them. Needs Python 3.11 or newer, make and a C++ compiler.

STAGE ?= 2
RANKS ?= 2
MODEL ?= 3m
CONFIG ?= 3d
TENSOR ?= 2
WORKERS ?= 2
DISK ?= out/benchmarks/disk
TORCH := torch==2.13.0
OLDEST := torch==2.11.0
BIN := .venv/bin
CANDIDATES := python3.11 python3.12 python3.13 python3 python
PYTHON ?= $(shell for name in $(CANDIDATES); do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: chaos deepspeed-wheel help install train train-3d train-megatron finetune memory-lab bigger-than-memory rscan long-document test test-cluster test-late test-late-faults test-oldest fuzz fuzz-idioms check bench bench-tiers record \
	bench-slow-network bench-communication bench-survival bench-gpu peers clients ray docs dist clean
.DEFAULT_GOAL := help

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: .venv/.installed  ## create .venv with pinned dependencies; the others do so by themselves

train: .venv/.installed  ## train a GPT; STAGE=0..3 RANKS=n STEPS=n MODEL=tiny|3m|30m|124m RESUME=1
	$(BIN)/shoal run --ranks $(RANKS) examples/gpt/train.py --shoal-config examples/gpt/zero$(STAGE).json \
		--model $(MODEL)$(if $(STEPS), --steps $(STEPS))$(if $(RESUME), --resume)

train-3d: .venv/.installed  ## train that GPT over three axes; CONFIG=3d|3d-zero3|pipeline|zbv|tensor RANKS=8 STEPS=n MODEL=... RESUME=1
	$(BIN)/shoal run --ranks $(if $(filter command environment,$(origin RANKS)),$(RANKS),8) examples/gpt3d/train.py \
		--shoal-config examples/gpt3d/$(CONFIG).json --model $(MODEL)$(if $(STEPS), --steps $(STEPS))$(if $(RESUME), --resume)

train-megatron: .venv/.installed  ## train a GPT-2 of tensor-parallel layers in Megatron's form; RANKS=4 TENSOR=2 STEPS=n
	$(BIN)/shoal run --ranks $(if $(filter command environment,$(origin RANKS)),$(RANKS),4) examples/megatron_gpt2/train.py \
		--model-parallel-size $(TENSOR) --deepspeed_config examples/megatron_gpt2/gpt2.json$(if $(STEPS), --train-iters $(STEPS))

finetune: .venv/.installed  ## fine-tune a Hugging Face model, with answers before and after; STAGE=0|2|3 RANKS=n ADAPTERS=rank MODEL=folder STEPS=n
	$(BIN)/shoal run --ranks $(RANKS) examples/finetune/finetune.py --shoal-config examples/finetune/zero$(STAGE).json$(if \
		$(ADAPTERS), --adapters $(ADAPTERS))$(if $(filter command,$(origin MODEL)), --model $(MODEL))$(if $(STEPS), --steps $(STEPS))

memory-lab: .venv/.installed  ## measure the memory of stages 0 to 3 beside their formulas; RANKS=n MODEL=...
	$(BIN)/python examples/memory_lab/lab.py --ranks $(RANKS)$(if $(filter command,$(origin MODEL)), --model $(MODEL))

bigger-than-memory: .venv/.installed  ## train a GPT of four times the memory it may take; CAP=512M STEPS=n DTYPE=fp32|bf16
	$(BIN)/python examples/bigger_than_memory/train.py$(if $(CAP), --cap $(CAP))$(if $(STEPS), --steps $(STEPS))$(if \
		$(DTYPE), --dtype $(DTYPE))

rscan: .venv/.installed  ## learn which docstring belongs to which function, on 1 rank and RANKS=n; OURS='sparse onebit' SEEDS=n SLOW=rate QUICK=1
	$(BIN)/python examples/rscan/compare.py --ranks $(RANKS)$(if $(OURS), --ours $(OURS))$(if $(SEEDS), --seeds $(SEEDS))$(if \
		$(SLOW), --slow $(SLOW))$(if $(STEPS), --steps $(STEPS))$(if $(QUICK), --quick)

long-document: .venv/.installed  ## read whole files: dense attention at what fits a memory, sparse ten times longer; MEMORY=940M STEPS=n QUICK=1
	$(BIN)/python examples/long_document/compare.py$(if $(MEMORY), --memory $(MEMORY))$(if $(STEPS), --steps $(STEPS))$(if \
		$(QUICK), --quick)

test-cluster: .venv/.installed  ## install sshd, pdsh, Open MPI, MPICH and Slurm by apt-get, and run the tests of launchers; needs root
	@test "$$(id -u)" = 0 || { echo >&2 "make test-cluster: needs root, for packages and network namespaces"; exit 1; }
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iproute2 openssh-server openssh-client pdsh \
		openmpi-bin mpich slurm-wlm munge procps
	SHOAL_TEST_CLUSTER=1 $(BIN)/pytest -v tests/cluster --durations=10

test: .venv/.installed  ## run every test, and print the 25 slowest; WORKERS=n files beside each other
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25

test-late: .venv/.installed  ## run suites on a device that is late, with drawn seeds; SEED=s COUNT=n SHARE=k ONLY=tests
	$(BIN)/python -m tests.late$(if $(SEED), --seed $(SEED))$(if $(COUNT), --count $(COUNT))$(if $(SHARE), --share $(SHARE)) $(ONLY)

test-oldest: .venv-oldest/.installed  ## run suites on the oldest torch that Shoal supports, in .venv-oldest (5 GB); ONLY=tests WORKERS=n
	.venv-oldest/bin/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/test_torch_versions.py $(if $(ONLY),$(ONLY),\
		tests/zero tests/engine tests/activation tests/optim tests/pipeline tests/tensor_parallel tests/tier tests/checkpoint \
		tests/transport tests/attention)

test-late-faults: .venv/.installed  ## remove waits of Shoal one by one, and show that the late device finds each; SEED=s
	$(if $(SEED),SHOAL_TEST_SEED=$(SEED) )$(BIN)/pytest -v tests/late/test_faults.py

fuzz: .venv/.installed  ## train random compositions of features and compare with plain PyTorch; SEED=s COUNT=n
	$(BIN)/python -m tests.fuzz$(if $(SEED), --seed $(SEED))$(if $(COUNT), --count $(COUNT))

fuzz-idioms: .venv/.installed  ## run random programs of PyTorch idioms beside plain PyTorch; SEED=s COUNT=n
	$(BIN)/python -m tests.fuzz.idioms$(if $(SEED), --seed $(SEED))$(if $(COUNT), --count $(COUNT))

chaos: .venv/.installed  ## kill, stop and hang ranks and the launcher of a training, and compare its losses; SEED=s COUNT=n RANKS=n MODEL=30m QUIET=seconds STAGES='2 3-offload 2-mesh'
	$(BIN)/python benchmarks/faults.py$(if $(SEED), --seed $(SEED))$(if $(COUNT), --faults $(COUNT))$(if $(RANKS), --ranks \
		$(RANKS))$(if $(STAGES), --stages $(STAGES))$(if $(QUIET), --quiet $(QUIET))$(if $(filter command,$(origin MODEL)), \
		--model $(MODEL))

check: .venv/.installed  ## lint, check types, import layers and file sizes
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/pytest tests/test_house.py

bench: .venv/.installed  ## time a step, its bytes and memory beside DDP, FSDP2 and (after make peers) DeepSpeed
	$(BIN)/python benchmarks/tuning.py
	$(BIN)/python benchmarks/zero.py

bench-tiers: .venv/.installed  ## time state on the host and on disk: steps, the disk beside fio, overlap, memory; DISK=folder
	mkdir -p $(DISK)
	$(BIN)/python benchmarks/optimizer.py
	$(BIN)/python benchmarks/disk.py $(DISK)
	$(BIN)/python benchmarks/tiers.py --path $(DISK)

bench-slow-network: .venv/.installed  ## time a GPT on two hosts over the rate of their link; needs root and iproute2
	$(BIN)/python benchmarks/hosts.py --check
	$(BIN)/python benchmarks/slow_network.py --plot

bench-communication: .venv/.installed  ## time and count what compressing and sparse gradients save between two hosts; root, iproute2
	$(BIN)/python benchmarks/hosts.py --check
	$(BIN)/python benchmarks/communication.py --plot
	$(BIN)/python benchmarks/compression.py
	$(BIN)/python benchmarks/sparse.py

bench-survival: .venv/.installed  ## measure what copies in memory, the guard and the watch cost a step; RANKS=n
	$(BIN)/python benchmarks/survival.py$(if $(filter command,$(origin RANKS)), --ranks $(RANKS))

record: .venv/.installed  ## list the sections of docs/measurements.md, or make some anew; SECTIONS='tuning-2 zero-2'
	$(BIN)/python benchmarks/record.py $(if $(SECTIONS),$(filter-out none,$(SECTIONS)),--list)

bench-gpu: .venv/.installed  ## say what a GPU campaign lacks here; with a GPU run its three commands of ten minutes each
	$(BIN)/python benchmarks/gpu_campaign.py
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || exit 0; \
		for part in facts steps states; do $(BIN)/python benchmarks/gpu_$$part.py; done

peers: .venv/.installed  ## create .venv-peers, where DeepSpeed lives for make bench
	PYTHON=$(BIN)/python sh benchmarks/peers.sh

clients: .venv-clients/.installed $(if $(PEERS),.venv-peers/.clients)  ## run Trainer, Accelerate, Lightning, PEFT and TRL scripts in .venv-clients; ONLY=word PEERS=1 TIMES=n STEPS=n
	.venv-clients/bin/python -m tests.clients$(if $(ONLY), --only '$(ONLY)')$(if $(PEERS), --peers)$(if $(TIMES), --times $(TIMES)) \
		$(if $(STEPS),--options '--steps $(STEPS)')

ray: .venv-ray/.installed  ## train on a Ray of this machine: Ray Train starts the ranks, and starts them again after a failure
	RAY_USAGE_STATS_ENABLED=0 .venv-ray/bin/python examples/cluster/ray_train.py --fail-at 25

docs: .venv/.docs  ## build the documentation site in out/site; check its links, and that it loads nothing from other hosts
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	$(BIN)/python tools/check_site.py out/site

dist: .venv/.installed  ## build wheel and sdist in dist/; install each without a compiler, and train with it on 1 and 2 ranks
	rm -rf dist
	PIP_CONSTRAINT='$(CURDIR)/constraints.txt' $(BIN)/pyproject-build
	$(BIN)/python tools/check_dist.py dist $(TORCH)

deepspeed-wheel: .venv/.installed  ## build dist/deepspeed/deepspeed-*.whl: Shoal under that name, for local installation alone
	$(BIN)/python tools/deepspeed_wheel.py dist/deepspeed

clean:  ## remove what was made, but for the environments
	rm -rf out build dist .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo >&2 "make: Python 3.11 or newer is needed, and none of \
	$(CANDIDATES) is it. Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo >&2 "make: Python 3.11 or newer is \
	needed; $(PYTHON) is $$($(PYTHON) --version 2>&1)"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

.venv-clients/.installed: .venv/.installed tests/clients/constraints.txt tools/deepspeed_wheel.py src/shoal/compat/distribution.py
	test -x .venv-clients/bin/pip || $(BIN)/python -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --constraint constraints.txt $(TORCH)
	.venv-clients/bin/pip install --quiet --constraint tests/clients/constraints.txt transformers accelerate lightning peft trl \
		datasets pytest --editable .
	$(BIN)/python tools/deepspeed_wheel.py dist/deepspeed
	.venv-clients/bin/pip install --quiet --no-deps --force-reinstall dist/deepspeed/deepspeed-*.whl
	@touch $@

.venv-peers/.clients: .venv/.installed tests/clients/constraints.txt
	PYTHON=$(BIN)/python sh benchmarks/peers.sh
	.venv-peers/bin/pip install --quiet --constraint tests/clients/constraints.txt transformers accelerate lightning peft trl datasets
	@touch $@

.venv-oldest/.installed: pyproject.toml
	test -x .venv-oldest/bin/pip || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet $(OLDEST) hypothesis pytest pytest-timeout pytest-xdist --editable .
	@touch $@

.venv-ray/.installed: .venv/.installed
	test -x .venv-ray/bin/pip || $(BIN)/python -m venv .venv-ray
	.venv-ray/bin/pip install --quiet --constraint constraints.txt $(TORCH)
	.venv-ray/bin/pip install --quiet --constraint constraints.txt 'ray[train]>=2.60' --editable .
	@touch $@

.venv/.docs: .venv/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@
