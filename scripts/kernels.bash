# Other builds of the kernels, for scripts that run regard on them; sourced. The regard that is
# installed with `pip install -e` keeps its own compiled module.

build() { # FOLDER COMPILER FLAGS CMAKE_WORDS: what it says is in FOLDER.log
  mkdir -p "$1"
  {
    CXX=$2 cmake -S . -B "$1" -DCMAKE_BUILD_TYPE=None \
      -DPython_EXECUTABLE="$(command -v python)" -Dnanobind_DIR="$(python -m nanobind --cmake_dir)" \
      -DCMAKE_CXX_FLAGS="$3" "${@:4}" && cmake --build "$1" --target _kernels
  } > "$1.log" 2>&1 && use_in "$1"
}

# Python runs the sitecustomize that it finds first: this one gives it the module built in FOLDER.
use_in() {
  mkdir -p "$1/path"
  cat > "$1/path/sitecustomize.py" << PYTHON
import glob, importlib.util, sys

class Built:
    def find_spec(self, name, path=None, target=None):
        if name == "regard._kernels":
            (file,) = glob.glob("$PWD/$1/_kernels*.so")
            return importlib.util.spec_from_file_location(name, file)

sys.meta_path.insert(0, Built())
PYTHON
}

with_build() { # FOLDER COMMAND
  env PYTHONPATH="$PWD/$1/path" "${@:2}"
}

targets() { # FOLDER BEFORE: the instruction sets of the build that this processor runs
  with_build "$1" "${@:2}" python -c "
from regard._backends import kernel
assert kernel.kernels.__file__.startswith('$PWD/$1/'), 'regard uses another module'
print(*kernel.kernels.targets())"
}
