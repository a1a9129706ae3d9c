//! How each module's weight is stored.
//!
//! Invariant: the tensors decide. A module is quantised exactly if its scales are there, with the parameters that the shapes
//! show; a config that says otherwise about such a module is an error that names both, never a silent choice, since wrong
//! bits give garbage text and no failure.
//! Source: MLX's quantisation modes; the OCP microscaling formats; Qwen's FP8 releases (128 × 128 blocks).

use std::collections::BTreeMap;
use std::fmt;

use safetensors::Dtype;
use serde_json::{Map, Value};

use super::checkpoint::{dtype_name, Checkpoint, TensorView};
use super::config::CONFIG_FILE;
use super::error::{LoadError, Result};
use super::fields::{brief, Fields};
use super::names;

/// Bits that affine codes may have.
const AFFINE_BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];
/// Input columns that may share an affine scale.
const AFFINE_GROUPS: [usize; 3] = [32, 64, 128];
/// Block of the FP8 releases.
const FP8_BLOCK: [usize; 2] = [128, 128];

/// How one module's weight is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ModuleQuant {
    /// Floats.
    Dense,
    /// `code * scale + bias`, scales and biases in the model's type.
    Affine {
        /// Bits a code.
        bits: usize,
        /// Input columns that share a scale.
        group: usize,
    },
    /// E2M1 codes, a power of two for each 32.
    Mxfp4,
    /// E4M3 codes, a power of two for each 32.
    Mxfp8,
    /// E2M1 codes, an E4M3 scale for each 16.
    Nvfp4 {
        /// Whether `global_scale` multiplies the output.
        global_scale: bool,
    },
    /// E4M3 values times a factor for each block of the matrix.
    Fp8Block {
        /// Rows of a block.
        rows: usize,
        /// Columns of a block.
        cols: usize,
    },
}

impl ModuleQuant {
    /// MLX's (mode, bits, group size); `None` for what MLX doesn't compute with as it is stored.
    pub fn mlx(self) -> Option<(&'static str, usize, usize)> {
        match self {
            Self::Dense | Self::Fp8Block { .. } => None,
            Self::Affine { bits, group } => Some(("affine", bits, group)),
            Self::Mxfp4 => Some(("mxfp4", 4, 32)),
            Self::Mxfp8 => Some(("mxfp8", 8, 32)),
            Self::Nvfp4 { .. } => Some(("nvfp4", 4, 16)),
        }
    }
}

impl fmt::Display for ModuleQuant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dense => f.write_str("dense"),
            Self::Affine { bits, group } => write!(f, "affine {bits}-bit group {group}"),
            Self::Mxfp4 => f.write_str("mxfp4"),
            Self::Mxfp8 => f.write_str("mxfp8"),
            Self::Nvfp4 { global_scale: false } => f.write_str("nvfp4"),
            Self::Nvfp4 { global_scale: true } => f.write_str("nvfp4 with global scale"),
            Self::Fp8Block { rows, cols } => write!(f, "fp8 {rows}x{cols} blocks"),
        }
    }
}

/// How FP8 blocks are held in memory: MLX multiplies with none as they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fp8Form {
    /// Decoded to bf16, which holds nearly everything that they say, in twice the bytes.
    #[default]
    Bf16,
    /// Rounded anew to mxfp8, in about as many bytes as they have.
    Mxfp8,
}

impl Fp8Form {
    /// For the log, and the flag's value.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Mxfp8 => "mxfp8",
        }
    }

    /// What a matrix of `input` columns becomes; `None`: floats. Rows that hold no whole groups stay floats.
    pub fn requantised(self, input: usize) -> Option<ModuleQuant> {
        (self == Self::Mxfp8 && input.is_multiple_of(32)).then_some(ModuleQuant::Mxfp8)
    }
}

impl std::str::FromStr for Fp8Form {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "bf16" => Ok(Self::Bf16),
            "mxfp8" => Ok(Self::Mxfp8),
            other => Err(format!("expected bf16 or mxfp8, got {other:?}")),
        }
    }
}

/// What a config says about a module.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Declared {
    mode: String,
    bits: Option<usize>,
    group: Option<usize>,
}

impl Declared {
    /// A table without `mode` is affine, inside of a table of another mode too: nothing is inherited.
    fn parse(fields: &Fields<'_>) -> Result<Self> {
        Ok(Self {
            mode: fields.text("mode")?.unwrap_or("affine").to_owned(),
            bits: fields.size("bits", 1..=64)?,
            group: fields.size("group_size", 1..=1 << 20)?,
        })
    }

    fn agrees(&self, found: ModuleQuant) -> bool {
        found.mlx().is_some_and(|(mode, bits, group)| {
            self.mode == mode && self.bits.is_none_or(|b| b == bits) && self.group.is_none_or(|g| g == group)
        })
    }
}

impl fmt::Display for Declared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.mode)?;
        if let Some(bits) = self.bits {
            write!(f, " {bits}-bit")?;
        }
        if let Some(group) = self.group {
            write!(f, " group {group}")?;
        }
        Ok(())
    }
}

/// The config's quantisation table.
#[derive(Debug, Clone, Default)]
pub struct QuantTable {
    global: Option<Declared>,
    /// A table of the head's own.
    head: Option<Declared>,
    /// By canonical module path; `None`: said to be dense.
    modules: BTreeMap<String, Option<Declared>>,
    fp8_block: Option<[usize; 2]>,
}

impl QuantTable {
    /// Reads what `config.json` (`top`) says.
    ///
    /// # Errors
    /// A malformed table, or a method that no MLX or FP8 block file has (GPTQ, AWQ, bitsandbytes, …).
    pub fn parse(top: &Map<String, Value>) -> Result<Self> {
        let file = Fields::new(CONFIG_FILE, "", top);
        let inner = file
            .object("text_config")?
            .map(|map| Fields::new(CONFIG_FILE, "text_config.", map));
        let mut table = Self::default();
        for name in ["quantization", "quantization_config"] {
            for level in [Some(file), inner].into_iter().flatten() {
                if let (None, None, Some(map)) = (&table.global, table.fp8_block, level.object(name)?) {
                    let scope = format!("{}.", level.path(name));
                    table.read(&Fields::new(CONFIG_FILE, &scope, map), map)?;
                }
            }
        }
        for (key, value) in top
            .iter()
            .filter(|(key, _)| key.contains("mtp") && key.contains("quant"))
        {
            if let Some(map) = value.as_object().filter(|map| map.contains_key("bits")) {
                let scope = format!("{key}.");
                table.head = Some(Declared::parse(&Fields::new(CONFIG_FILE, &scope, map))?);
            }
        }
        Ok(table)
    }

    fn read(&mut self, fields: &Fields<'_>, map: &Map<String, Value>) -> Result<()> {
        match fields.text("quant_method")? {
            None | Some("mlx") => {}
            Some("fp8") => {
                self.fp8_block = Some(fp8_block(fields)?);
                return Ok(());
            }
            Some(method) => {
                let value = Value::from(method);
                return Err(fields.unsupported(
                    "quant_method",
                    &value,
                    "MLX quantisation and fp8 blocks are",
                ));
            }
        }
        if fields.get("bits").is_some() || fields.get("group_size").is_some() {
            self.global = Some(Declared::parse(fields)?);
        }
        for (key, value) in map {
            let declared = match value {
                Value::Object(inner) => {
                    let scope = format!("{}.", fields.path(key));
                    Some(Declared::parse(&Fields::new(CONFIG_FILE, &scope, inner))?)
                }
                Value::Bool(false) => None,
                // `true` asks for the global parameters, which is what a module without an entry gets.
                _ => continue,
            };
            self.modules.insert(names::canonical(key), declared);
        }
        Ok(())
    }

    /// What the config says about a module that has scales, and in which place.
    fn declared(&self, path: &str) -> (Option<&Declared>, &'static str) {
        if let Some(module) = self.modules.get(path) {
            return (module.as_ref(), "for this module");
        }
        match &self.head {
            Some(head) if path.starts_with("mtp.") => (Some(head), "for the head"),
            _ => (self.global.as_ref(), "for all modules"),
        }
    }

    /// How module `path` with the logical weight shape `[…, out, in]` is stored.
    ///
    /// The weight is `<path>.weight`, or `<path>` itself where stacked experts carry no suffix.
    ///
    /// # Errors
    /// No weight, a shape or type that doesn't fit, codes without scales, or parameters other than the config says.
    pub fn module(&self, checkpoint: &Checkpoint, path: &str, shape: &[usize]) -> Result<ModuleQuant> {
        let with_suffix = format!("{path}.weight");
        let weight = checkpoint
            .tensor(&with_suffix)
            .or_else(|| checkpoint.tensor(path));
        let weight = weight.ok_or(LoadError::MissingTensors {
            names: vec![with_suffix],
        })?;
        let part = |name: &str| checkpoint.tensor(&format!("{path}.{name}"));
        if let Some(scales) = part("scales") {
            return self.packed(&Packed {
                path,
                shape,
                weight,
                scales,
                part: &part,
            });
        }
        let missing = |name: &str| LoadError::MissingScales {
            module: path.to_owned(),
            stored: dtype_name(weight.dtype),
            missing: name.to_owned(),
        };
        match weight.dtype {
            Dtype::BF16 | Dtype::F16 | Dtype::F32 if weight.shape == shape => Ok(ModuleQuant::Dense),
            Dtype::BF16 | Dtype::F16 | Dtype::F32 => Err(weight.wrong_shape(format!("{shape:?}"))),
            Dtype::F8_E4M3 => {
                let name = format!("{}_scale_inv", weight.name);
                let scale = checkpoint.tensor(&name).ok_or_else(|| missing(&name))?;
                self.fp8(&weight, &scale, shape)
            }
            Dtype::U32 | Dtype::U8 | Dtype::I32 => Err(missing(&format!("{path}.scales"))),
            _ => Err(weight.wrong_dtype("bf16, f16, f32, f8_e4m3 or packed u32")),
        }
    }

    fn packed(&self, m: &Packed<'_>) -> Result<ModuleQuant> {
        let found = m.infer()?;
        let mismatch = |config: String| LoadError::QuantMismatch {
            module: m.path.to_owned(),
            config,
            tensors: found.to_string(),
        };
        match self.declared(m.path) {
            (Some(declared), place) if !declared.agrees(found) => {
                Err(mismatch(format!("{declared} {place}")))
            }
            (None, place) if self.modules.contains_key(m.path) => {
                Err(mismatch(format!("not quantised, {place}")))
            }
            _ => Ok(found),
        }
    }

    fn fp8(&self, weight: &TensorView<'_>, scale: &TensorView<'_>, shape: &[usize]) -> Result<ModuleQuant> {
        if weight.shape != shape {
            return Err(weight.wrong_shape(format!("{shape:?}")));
        }
        if !matches!(scale.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
            return Err(scale.wrong_dtype("bf16, f16 or f32"));
        }
        let [rows, cols] = self.fp8_block.unwrap_or(FP8_BLOCK);
        let mut wanted = shape.to_vec();
        if let [.., out, input] = &mut wanted[..] {
            (*out, *input) = (out.div_ceil(rows), input.div_ceil(cols));
        }
        if scale.shape != wanted {
            return Err(scale.wrong_shape(format!(
                "{wanted:?}, one factor for each block of {rows} x {cols}"
            )));
        }
        Ok(ModuleQuant::Fp8Block { rows, cols })
    }
}

fn fp8_block(fields: &Fields<'_>) -> Result<[usize; 2]> {
    if let (Some(fmt), Some(value)) = (fields.text("fmt")?, fields.get("fmt")) {
        if fmt != "e4m3" {
            return Err(fields.unsupported("fmt", value, "only e4m3"));
        }
    }
    let Some(items) = fields.list("weight_block_size")? else {
        return Ok(FP8_BLOCK);
    };
    let sizes: Vec<usize> = items
        .iter()
        .filter_map(Value::as_u64)
        .filter_map(|n| usize::try_from(n).ok())
        .filter(|n| *n > 0)
        .collect();
    <[usize; 2]>::try_from(sizes).map_err(|_| LoadError::BadField {
        file: CONFIG_FILE.to_owned(),
        field: fields.path("weight_block_size"),
        value: brief(&Value::from(items.to_vec())),
        expected: "two sizes above 0".to_owned(),
    })
}

/// The tensors of a module that has scales.
struct Packed<'a> {
    path: &'a str,
    /// Logical, […, out, in].
    shape: &'a [usize],
    weight: TensorView<'a>,
    scales: TensorView<'a>,
    part: &'a dyn Fn(&str) -> Option<TensorView<'a>>,
}

impl Packed<'_> {
    /// Parameters that the shapes and types show, with every shape checked.
    fn infer(&self) -> Result<ModuleQuant> {
        if self.weight.dtype != Dtype::U32 {
            return Err(self.weight.wrong_dtype("u32, since it has scales"));
        }
        let (rows, input) = match self.shape {
            [rows @ .., input] => (rows, *input),
            [] => return Err(self.weight.wrong_shape("a matrix")),
        };
        let last = |view: &TensorView<'_>| match view.shape {
            [lead @ .., n] if lead == rows && *n > 0 => Ok(*n),
            _ => Err(view.wrong_shape(format!("{rows:?} and a packed row for {input} inputs"))),
        };
        let (words, groups) = (last(&self.weight)?, last(&self.scales)?);
        let group = input / groups;
        let bits = words.saturating_mul(32) / input;
        if group * groups != input || bits.saturating_mul(input) != words.saturating_mul(32) {
            let wanted = format!(
                "whole groups and whole bits for {input} inputs, not {words} words and {groups} scales"
            );
            return Err(self.weight.wrong_shape(wanted));
        }
        let global = (self.part)("global_scale");
        let found = match (self.scales.dtype, bits, group) {
            (Dtype::U8, 4, 32) => ModuleQuant::Mxfp4,
            (Dtype::U8, 8, 32) => ModuleQuant::Mxfp8,
            (Dtype::U8, 4, 16) => ModuleQuant::Nvfp4 {
                global_scale: global.is_some(),
            },
            (Dtype::U8, ..) => {
                let wanted =
                    format!("4 bits in groups of 16 or 32, or 8 in 32; found {bits} bits in {group}");
                return Err(self.scales.wrong_shape(wanted));
            }
            (Dtype::BF16 | Dtype::F16 | Dtype::F32, bits, group)
                if AFFINE_BITS.contains(&bits) && AFFINE_GROUPS.contains(&group) =>
            {
                self.check_biases()?;
                ModuleQuant::Affine { bits, group }
            }
            (Dtype::BF16 | Dtype::F16 | Dtype::F32, ..) => {
                let wanted = format!(
                    "affine codes of {AFFINE_BITS:?} bits in groups of {AFFINE_GROUPS:?}; found {bits} bits in {group}"
                );
                return Err(self.scales.wrong_shape(wanted));
            }
            _ => return Err(self.scales.wrong_dtype("u8, bf16, f16 or f32")),
        };
        match global {
            Some(scale) if matches!(found, ModuleQuant::Nvfp4 { .. }) => check_global_scale(&scale, rows)?,
            Some(scale) => return Err(scale.wrong_shape(format!("nothing: {found} has no global scale"))),
            None => {}
        }
        Ok(found)
    }

    fn check_biases(&self) -> Result<()> {
        let Some(biases) = (self.part)("biases") else {
            return Err(LoadError::MissingScales {
                module: self.path.to_owned(),
                stored: "affine codes".to_owned(),
                missing: format!("{}.biases", self.path),
            });
        };
        if biases.shape != self.scales.shape {
            return Err(biases.wrong_shape(format!("{:?}, that of its scales", self.scales.shape)));
        }
        if biases.dtype != self.scales.dtype {
            return Err(biases.wrong_dtype("that of its scales"));
        }
        Ok(())
    }
}

/// One factor for the matrix, or one for each matrix of a stack; `rows` is the logical shape without its last axis.
fn check_global_scale(scale: &TensorView<'_>, rows: &[usize]) -> Result<()> {
    if !matches!(scale.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
        return Err(scale.wrong_dtype("bf16, f16 or f32"));
    }
    let count: usize = scale.shape.iter().product();
    let stack = if rows.len() > 1 { rows[0] } else { 1 };
    if count == 1 || count == stack {
        return Ok(());
    }
    Err(scale.wrong_shape(format!("one value, or {stack}")))
}
