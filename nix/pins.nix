# What the closure is made of: versions, and the hash of every file fetched by us.
# torch, torchvision and Triton are nixpkgs' own binary packages, so they have a version
# here (asserted at build time) and their hash in nixpkgs, which flake.lock pins.
let
  wheel =
    file: version: hash:
    {
      inherit file version hash;
      format = "wheel";
      dist = "py3";
      python = "py3";
      abi = "none";
      platform = "any";
    };
  abi3 =
    file: version: hash:
    wheel file version hash
    // {
      dist = "cp310";
      python = "cp310";
      abi = "abi3";
      platform = "manylinux_2_17_x86_64.manylinux2014_x86_64";
    };
in
{
  python = "3.12"; # the pinned inference.py needs it
  cuda = "12.8"; # the +cu128 build; one CUDA version for everything
  torch = "2.10.0";
  torchvision = "0.25.0";
  triton = "3.6.0";

  files = {
    transformers =
      wheel "transformers" "5.17.0"
        "sha256-eOwc4hV5s437g5UKBljNEZ+HISovz9/0eAls6dbAOAE=";
    flash-linear-attention =
      wheel "flash_linear_attention" "0.5.2"
        "sha256-3PQF2B9UJjk7WQNwl6pwDQ9KhBRl1QKNWqVD9FAvJAA=";
    fla-core =
      wheel "fla_core" "0.5.2"
        "sha256-XoMMhbrT0NNGd/mKxwdNCGh6N1bw8Emdlc65braSB2E=";
    huggingface-hub =
      wheel "huggingface_hub" "1.33.0"
        "sha256-BOQ0sG4QDt286aboF9cmk6eISxCnm9Z6tICA1cB+uJk=";
    einops =
      wheel "einops" "0.8.2"
        "sha256-VAWCAaxwh5ERgb/sSvYJG7WTgDYPBpJ2YBJWp2rwgZM=";
    tokenizers =
      abi3 "tokenizers" "0.23.3"
        "sha256-N2hR0ivPnWUKXDCQu4Pmz56JX78FlTafpM1DwfabX4c=";
    safetensors =
      abi3 "safetensors" "0.8.0"
        "sha256-/W8/k8mgp8wniO5j+3YzU9S9LomwdRvHj8992gC+p3Q=";
    backports-zstd =
      wheel "backports_zstd" "1.8.0"
        "sha256-+emqKKRNsYl/tjfwNxdVZvO3WJDUuubK57o08d8eCAQ="
      // {
        dist = "cp312";
        python = "cp312";
        abi = "cp312";
        platform = "manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64";
      };
    causal-conv1d = {
      file = "causal_conv1d";
      version = "1.7.0";
      format = "setuptools"; # the index has no wheel of it
      hash = "sha256-MgJ1hJTqp7WXzhwoLfoYiIlQa/y5LK08QH0mc2v80ys=";
    };
  };
}
