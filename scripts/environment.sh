# Sourced by the other scripts: makes a virtual environment with this project in it, or brings it up to date.

# usage: prepare_environment NAME EXTRAS
# Leaves the path of its Python in $python. PYTHON chooses the interpreter (default python3).
prepare_environment() {
    local environment=".venv-$1" extras="$2" base="${PYTHON:-python3}" key log
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "autopar needs Python 3.11 or later, got: $("$base" --version 2>&1). Name another one: PYTHON=python3.12 $0" >&2
        return 1
    fi
    python="$environment/bin/python"
    log="$environment/install.log"
    key="$("$base" -c 'import sys; print(sys.version, sys.base_prefix)') $extras $(cksum <pyproject.toml)"
    if [ -x "$python" ] && [ "$(cat "$environment/installed" 2>/dev/null)" = "$key" ]; then
        return 0
    fi
    echo "Installing autopar into $environment ..."
    rm -rf "$environment"
    "$base" -m venv "$environment"
    if ! "$python" -m pip install --quiet --disable-pip-version-check --no-input --progress-bar off \
        --no-compile --editable ".[$extras]" >"$log" 2>&1; then
        echo "The installation failed; the end of $log:" >&2
        tail -n 20 "$log" | sed -E 's#[a-z]+://[^/ ]*#the package index#g' >&2
        return 1
    fi
    echo "$key" >"$environment/installed"
}
