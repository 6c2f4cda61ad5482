# The part of nixpkgs' lib that ../../nix uses, and an evaluator for one module: checks
# types, applies defaults, refuses unknown options. Ours, and no more than the tests need.
let
  lib = rec {
    optional = condition: value: if condition then [ value ] else [ ];
    optionals = condition: values: if condition then values else [ ];
    optionalAttrs = condition: set: if condition then set else { };
    inherit (builtins)
      concatLists
      concatMap
      concatStringsSep
      mapAttrs
      replaceStrings
      ;
    concatMapStringsSep = separator: f: list: concatStringsSep separator (map f list);
    nameValuePair = name: value: { inherit name value; };
    mapAttrsToList = f: set: map (name: f name set.${name}) (builtins.attrNames set);
    mapAttrs' = f: set: builtins.listToAttrs (mapAttrsToList f set);
    filterAttrs =
      keep: set:
      builtins.listToAttrs (
        builtins.filter (pair: keep pair.name pair.value) (mapAttrsToList nameValuePair set)
      );
    hasPrefix = prefix: text: builtins.substring 0 (builtins.stringLength prefix) text == prefix;
    hasInfix = infix: text: builtins.length (builtins.split (escape infix) text) > 1;
    escape = replaceStrings [ "." "[" "(" ] [ "[.]" "[[]" "[(]" ];
    escapeShellArg = text: "'${replaceStrings [ "'" ] [ "'\\''" ] text}'";
    unique = builtins.foldl' (kept: x: if builtins.elem x kept then kept else kept ++ [ x ]) [ ];
    assertMsg = fact: message: fact || throw message;
    getBin = package: package.bin or package;
    getDev = package: package.dev or package;
    getLib = package: package.lib or package;
    getExe = package: "${getBin package}/bin/${package.meta.mainProgram}";
    versions.majorMinor =
      version:
      let
        parts = builtins.splitVersion version;
      in
      "${builtins.elemAt parts 0}.${builtins.elemAt parts 1}";

    mkOption = settings: settings // { _type = "option"; };
    mkEnableOption =
      description:
      mkOption {
        type = types.bool;
        default = false;
        inherit description;
      };
    mkIf = condition: content: {
      _type = "if";
      inherit condition content;
    };
    mkDefault = content: content;

    # A type: `check` a value, then `merge` it into what config holds, at `path`.
    types =
      let
        plain = name: check: {
          inherit name check;
          merge = path: value: value;
        };
        positive = value: value > 0;
        isNumber = value: builtins.isInt value || builtins.isFloat value;
      in
      {
        bool = plain "bool" builtins.isBool;
        str = plain "str" builtins.isString;
        package = plain "package" (value: value ? outPath);
        port = plain "port" (value: builtins.isInt value && value >= 0 && value <= 65535);
        ints.positive = plain "positive int" (value: builtins.isInt value && positive value);
        ints.unsigned = plain "unsigned int" (value: builtins.isInt value && value >= 0);
        numbers.positive = plain "positive number" (value: isNumber value && positive value);
        enum = values: plain "enum" (value: builtins.elem value values);
        strMatching =
          pattern:
          plain "str matching ${pattern}" (
            value: builtins.isString value && builtins.match pattern value != null
          );
        nullOr = type: {
          name = "null or ${type.name}";
          check = value: value == null || type.check value;
          merge = path: value: if value == null then null else type.merge path value;
        };
        listOf = type: {
          name = "list of ${type.name}";
          check = value: builtins.isList value && builtins.all type.check value;
          merge = path: map (type.merge path);
        };
        attrsOf = type: {
          name = "attrs of ${type.name}";
          check = value: builtins.isAttrs value && builtins.all type.check (builtins.attrValues value);
          merge = path: builtins.mapAttrs (name: type.merge "${path}.${name}");
        };
        submodule = module: {
          name = "submodule";
          check = builtins.isAttrs;
          merge = path: resolve path (module { name = baseNameOf (replaceStrings [ "." ] [ "/" ] path); }).options;
        };
      };

    isOption = value: (value._type or "") == "option";

    # Options and a user's settings -> config, laziness kept for every single option.
    resolve =
      path: options: settings:
      let
        unknown = builtins.attrNames (removeAttrs settings (builtins.attrNames options));
        one =
          name: option:
          let
            at = "${path}.${name}";
            value = settings.${name};
          in
          if !(isOption option) then
            resolve at option (settings.${name} or { })
          else if !(settings ? ${name}) then
            (option.default or (throw "The option `${at}' is used but not defined."))
          else if !(option.type.check value) then
            throw "A definition for option `${at}' is not of type `${option.type.name}'."
          else
            option.type.merge at value;
      in
      if unknown != [ ] then
        throw "The option `${path}.${builtins.head unknown}' does not exist."
      else
        builtins.mapAttrs one options;

    # Take `mkIf`s out of a config tree; a false one leaves nothing.
    discharge =
      value:
      if (value._type or "") == "if" then
        if value.condition then discharge value.content else { }
      else if builtins.isAttrs value && !(value ? outPath) then
        builtins.mapAttrs (_: discharge) value
      else
        value;

    # One module and a user's settings -> what the module asks of the system.
    evalModule =
      {
        module,
        pkgs,
        settings,
      }:
      let
        evaluated = module { inherit config lib pkgs; };
        config = resolve "" evaluated.options settings;
        asked = discharge evaluated.config;
        broken = builtins.filter (one: !one.assertion) (asked.assertions or [ ]);
      in
      if broken != [ ] then throw (builtins.head broken).message else removeAttrs asked [ "assertions" ];
  };
in
lib
