# The service with its closure. `cudaArchitectures` is what causal-conv1d is compiled
# for; code for 8.0 also runs on 8.6 and 8.9.
{
  lib,
  stdenv,
  python312,
  cudaPackages_12_8,
  addDriverRunpath,
  autoPatchelfHook,
  symlinkJoin,
  which,
  cudaArchitectures ? [
    "8.0"
    "9.0"
    "10.0"
    "12.0"
  ],
  source ? import ./source.nix,
}:

let
  pins = import ./pins.nix;
  cudaPackages = cudaPackages_12_8;

  python = python312.override {
    self = python;
    packageOverrides = import ./python-packages.nix {
      inherit
        lib
        stdenv
        autoPatchelfHook
        symlinkJoin
        which
        cudaPackages
        cudaArchitectures
        pins
        ;
    };
  };

  versionLine = builtins.match ''.*__version__ = "([^"]+)".*'' (
    builtins.readFile ../intern_decision_serve/__init__.py
  );

  driverLibraries = "${addDriverRunpath.driverLink}/lib";

  # What Triton and torch look for at run time. Each but the library path is a default,
  # so that a unit can set another.
  runtime = {
    # torch opens nvrtc by its bare name; the driver's own libraries come first.
    LD_LIBRARY_PATH = "${driverLibraries}:${lib.getLib cudaPackages.cuda_nvrtc}/lib";
    # Else Triton asks /sbin/ldconfig, which NixOS has not.
    TRITON_LIBCUDA_PATH = driverLibraries;
    TRITON_PTXAS_PATH = "${lib.getBin cudaPackages.cuda_nvcc}/bin/ptxas";
    # Triton compiles C against Python.h; the headers come with this Python.
    CC = "${stdenv.cc}/bin/cc";
  };

  expected = {
    inherit (pins) cuda;
    torch = "${pins.torch}+cu${lib.replaceStrings [ "." ] [ "" ] pins.cuda}";
    distributions =
      lib.mapAttrs (_: pin: pin.version) pins.files
      // {
        inherit (pins) torchvision triton;
      };
  };
in

assert lib.assertMsg (python.pythonVersion == pins.python)
  "package.nix is for Python ${pins.python}, not ${python.pythonVersion}";
assert lib.assertMsg (lib.versions.majorMinor cudaPackages.cuda_cudart.version == pins.cuda)
  "package.nix is for CUDA ${pins.cuda}, not ${cudaPackages.cuda_cudart.version}";

python.pkgs.buildPythonApplication {
  pname = "intern-decision-serve";
  version = builtins.head versionLine;
  pyproject = true;
  src = source;

  build-system = [ python.pkgs.setuptools ];

  dependencies = [
    python.pkgs.backports-zstd
    python.pkgs.prometheus-client
    python.pkgs.torch-bin
    python.pkgs.torchvision-bin
    python.pkgs.pillow
    python.pkgs.transformers
    python.pkgs.flash-linear-attention
    python.pkgs.fla-core
    python.pkgs.causal-conv1d
  ];

  makeWrapperArgs = [
    "--prefix LD_LIBRARY_PATH : ${runtime.LD_LIBRARY_PATH}"
    "--set-default TRITON_LIBCUDA_PATH ${runtime.TRITON_LIBCUDA_PATH}"
    "--set-default TRITON_PTXAS_PATH ${runtime.TRITON_PTXAS_PATH}"
    "--set-default CC ${runtime.CC}"
  ];

  nativeCheckInputs = [
    python.pkgs.hypothesis
    python.pkgs.pytest
  ];
  pythonImportsCheck = [ "intern_decision_serve" ];
  checkPhase = ''
    runHook preCheck
    export HOME=$TMPDIR
    LD_LIBRARY_PATH=${runtime.LD_LIBRARY_PATH} CC=${runtime.CC} \
      TRITON_PTXAS_PATH=${runtime.TRITON_PTXAS_PATH} \
      python ${./check_stack.py} ${lib.escapeShellArg (builtins.toJSON expected)}
    python -m pytest -q -p no:cacheprovider \
      -m "not torch and not gpu and not network" tests
    runHook postCheck
  '';

  passthru = {
    inherit pins python;
  };

  meta = {
    description = "Intern-Decision-4B behind semif-serve's HTTP surface and the Jev wire";
    mainProgram = "intern-decision-serve";
    platforms = [ "x86_64-linux" ];
  };
}
