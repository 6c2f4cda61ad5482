# The stack as an overlay of nixpkgs' Python packages: nixpkgs' binary torch, the rest
# from the package index by hash, causal-conv1d compiled here.
{
  lib,
  stdenv,
  autoPatchelfHook,
  symlinkJoin,
  which,
  cudaPackages,
  cudaArchitectures,
  pins,
}:

final: prev:

let
  # torch's binary package takes whatever CUDA nixpkgs prefers; hold all to one.
  withOurCuda = package: package.override { inherit cudaPackages; };

  fetch =
    pin:
    final.fetchPypi (
      removeAttrs pin [ "file" ]
      // {
        pname = pin.file;
      }
    );

  fromWheel =
    pname: settings:
    let
      pin = pins.files.${pname};
      compiled = pin.platform != "any";
    in
    final.buildPythonPackage (
      {
        inherit pname;
        inherit (pin) version format;
        src = fetch pin;
        nativeBuildInputs = lib.optionals compiled [ autoPatchelfHook ];
        buildInputs = lib.optionals compiled [ stdenv.cc.cc.lib ];
      }
      // settings
    );

  cudaToolkit = symlinkJoin {
    name = "cuda-${pins.cuda}-to-build-kernels";
    paths = lib.concatMap
      (part: [
        (lib.getBin part)
        (lib.getDev part)
        (lib.getLib part)
      ])
      [
        cudaPackages.cuda_nvcc
        cudaPackages.cuda_cudart
        cudaPackages.cuda_cccl
        cudaPackages.libcublas
        cudaPackages.libcusparse
        cudaPackages.libcusolver
      ];
  };

  generateCode =
    architecture:
    let
      digits = lib.replaceStrings [ "." ] [ "" ] architecture;
    in
    "-gencode arch=compute_${digits},code=sm_${digits}";

  buildWithNvcc = final.buildPythonPackage.override { stdenv = cudaPackages.backendStdenv; };
in
{
  torch-bin = withOurCuda prev.torch-bin;
  torchvision-bin = withOurCuda prev.torchvision-bin;

  transformers = fromWheel "transformers" {
    dependencies = [
      final.huggingface-hub
      final.numpy
      final.packaging
      final.pyyaml
      final.regex
      final.safetensors
      final.tokenizers
      final.tqdm
      final.typer
    ];
    pythonRelaxDeps = [
      "regex"
      "typer"
    ];
  };

  huggingface-hub = fromWheel "huggingface-hub" {
    dependencies = [
      final.click
      final.filelock
      final.fsspec
      final.httpx
      final.packaging
      final.pyyaml
      final.tqdm
      final.typing-extensions
    ];
    # Downloads are none of the service's business (INV-5), and click serves its command
    # line alone.
    pythonRemoveDeps = [ "hf-xet" ];
    pythonRelaxDeps = [ "click" ];
  };

  tokenizers = fromWheel "tokenizers" { dependencies = [ final.huggingface-hub ]; };
  safetensors = fromWheel "safetensors" { };
  einops = fromWheel "einops" { };
  backports-zstd = fromWheel "backports-zstd" { };

  # fla-core and flash-linear-attention share the package `fla` without sharing a file.
  fla-core = fromWheel "fla-core" {
    dependencies = [
      final.einops
      final.torch-bin
    ];
  };
  flash-linear-attention = fromWheel "flash-linear-attention" {
    dependencies = [
      final.fla-core
      final.transformers
    ];
  };

  causal-conv1d =
    let
      pin = pins.files.causal-conv1d;
    in
    buildWithNvcc {
      pname = "causal-conv1d";
      inherit (pin) version;
      pyproject = true;
      src = fetch (removeAttrs pin [ "format" ]);

      # It compiles for every architecture its nvcc knows: over 7 minutes on 12 cores for
      # one. The list is replaced just before it is used.
      postPatch = ''
        substituteInPlace setup.py --replace-fail \
          '    # HACK: The compiler flag' \
          '    cc_flag = os.environ["KERNEL_GENCODE"].split()
            # HACK: The compiler flag'
      '';

      build-system = [
        final.ninja
        final.packaging
        final.setuptools
        final.torch-bin
        final.wheel
      ];
      nativeBuildInputs = [ which ];
      buildInputs = [ cudaPackages.cuda_cudart ];
      dependencies = [
        final.packaging
        final.torch-bin
      ];
      pythonRemoveDeps = [ "ninja" ]; # needed to build, not to run

      env = {
        CUDA_HOME = "${cudaToolkit}";
        # Without it the build downloads somebody's wheel.
        CAUSAL_CONV1D_FORCE_BUILD = "TRUE";
        KERNEL_GENCODE = lib.concatMapStringsSep " " generateCode cudaArchitectures;
      };
      pythonImportsCheck = [ "causal_conv1d" ];
    };
}
