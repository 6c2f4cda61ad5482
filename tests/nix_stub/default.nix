# The part of nixpkgs that ../../nix names, every package a derivation that is not built.
{
  system ? "x86_64-linux",
  config ? { },
}:

let
  lib = import ./lib.nix;

  # A stand-in: real enough to be depended on, named so that it shows in the closure.
  fake =
    name: extra:
    derivation {
      inherit name system;
      builder = "/bin/sh";
      args = [
        "-c"
        "echo ${name} > $out"
      ];
    }
    // extra;

  # What a builder was told stays readable beside the derivation made of it.
  record =
    settings:
    fake "${settings.pname}-${settings.version}" {
      inherit settings;
      inherit (settings) pname version;
      meta = settings.meta or { };
      passthru = settings.passthru or { };
    };

  buildPythonPackage = {
    __functor = _: record;
    override = _: record;
  };

  binary =
    name: version:
    let
      package = fake "${name}-${version}" {
        pname = name;
        inherit version;
        override = _: package;
      };
    in
    package;

  named = names: builtins.listToAttrs (map (name: lib.nameValuePair name (fake name { })) names);

  pythonPackages =
    overrides:
    let
      final = previous // overrides final previous;
      previous =
        named [
          "click"
          "filelock"
          "fsspec"
          "httpx"
          "hypothesis"
          "ninja"
          "numpy"
          "packaging"
          "pillow"
          "prometheus-client"
          "pytest"
          "pyyaml"
          "regex"
          "setuptools"
          "tqdm"
          "typer"
          "typing-extensions"
          "wheel"
        ]
        // {
          inherit buildPythonPackage;
          buildPythonApplication = record;
          fetchPypi = settings: fake settings.pname { inherit settings; };
          torch-bin = binary "torch" "2.10.0";
          torchvision-bin = binary "torchvision" "0.25.0";
        };
    in
    final;

  callPackage =
    file: arguments:
    let
      function = import file;
      wanted = builtins.functionArgs function;
      known = builtins.intersectAttrs wanted pkgs;
    in
    function (known // arguments);

  pkgs =
    named [
      "autoPatchelfHook"
      "coreutils"
      "which"
    ]
    // {
      inherit lib callPackage config;
      stdenv.cc = fake "gcc" { cc = fake "gcc-unwrapped" { lib = fake "gcc-lib" { }; }; };
      symlinkJoin = settings: fake settings.name { inherit settings; };
      addDriverRunpath.driverLink = "/run/opengl-driver";
      python312.override = settings: {
        pythonVersion = "3.12";
        pkgs = pythonPackages settings.packageOverrides;
      };
      cudaPackages_12_8 =
        named [
          "cuda_nvcc"
          "cuda_cccl"
          "cuda_nvrtc"
          "libcublas"
          "libcusparse"
          "libcusolver"
        ]
        // {
          backendStdenv = { };
          cuda_cudart = fake "cuda_cudart" { version = "12.8.90"; };
        };
    };
in
pkgs
