//! Products of activations and packed codes: `y = x W^T + b` without ever making `W`.
//!
//! Activations are turned into integers, block by block ([`Precision`]); sums of products within a block are then exact,
//! and floating point begins where a block's sum meets its scales. Spec and bounds: `docs/cpu.md`.

mod activations;
#[cfg(target_arch = "x86_64")]
mod amx;
mod engine;
mod layout;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pack;
mod portable;
mod read;
mod streams;
mod tile;
mod versions;
mod windows;
#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
mod x86_values;

pub use activations::{Inputs, Precision};
pub use engine::Engine;
pub use layout::{Layout, PANEL};
pub use pack::{pack, rows, unpack, Codes};
pub use read::read;

use half::bf16;

use crate::disjoint::Disjoint;
pub(crate) use activations::Rows;
use loopq_core::execution::{number, pool};
use loopq_core::simd::Isa;
use loopq_core::{dims, Error, Execution, Result};
use tile::Panel;

/// Tokens quantized at once.
const TOKENS: usize = 512;
/// Tokens that a panel is multiplied by at once: their results stay in the first-level cache. A multiple of 16.
const FEW: usize = 32;
/// Panels that are multiplied together.
const GROUP: usize = 4;

/// Results of a few tokens, on whole cache lines.
#[repr(C, align(64))]
struct Results([f32; GROUP * FEW * PANEL]);

/// Where results go, (tokens, outputs).
#[derive(Debug)]
pub enum Outputs<'a> {
    /// float32.
    F32(&'a mut [f32]),
    /// The bits of bfloat16 numbers, rounded half to even.
    Bf16(&'a mut [u16]),
}

/// How a product is carried out; of these only the precision changes a bit of it.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// How finely activations are taken.
    pub precision: Precision,
    /// Instruction set.
    pub engine: Engine,
    /// Threads, which share the outputs: each always has the same ones.
    pub execution: Execution<'a>,
}

/// `out = x W^T + bias` for a packed `W`.
#[allow(unsafe_code)] // threads write columns of their own
pub fn multiply(
    layout: &Layout,
    packed: &[u8],
    x: Inputs<'_>,
    bias: Option<&[f32]>,
    out: Outputs<'_>,
    plan: &Plan<'_>,
) -> Result<()> {
    layout.check(packed)?;
    let (outputs, tokens) = (layout.outputs, x.tokens(layout.inputs)?);
    if let Some(bias) = bias {
        dims::check_matrix("the bias", bias, 1, outputs)?;
    }
    let columns = Columns::of(out, tokens, outputs)?;
    let chunk = tokens.min(TOKENS);
    let mut rows = Rows::new(layout, chunk, plan.precision, plan.engine.order(layout, chunk))?;
    let isa = Isa::best();
    for first in (0..tokens).step_by(TOKENS) {
        plan.execution.check()?;
        let count = TOKENS.min(tokens - first);
        rows.fill(layout, x, first..first + count, isa);
        let weight = Weight { layout, packed, bias, engine: plan.engine };
        share(layout.n_panels(), &plan.execution, |panels| {
            weight.run(&rows, count, panels, |token, column, values| {
                // SAFETY: `share` gives each thread different panels, and `run` writes columns of these panels only.
                unsafe { columns.write(first + token, column, values) };
            });
        })?;
    }
    Ok(())
}

/// A packed weight, with the instruction set that multiplies it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weight<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) packed: &'a [u8],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) engine: Engine,
}

impl Weight<'_> {
    /// Multiplies some panels by the first `count` of the tokens; `write` is given a token, the first of some outputs, and
    /// their values. These are outputs of the given panels only, each once for every token.
    pub(crate) fn run(
        &self,
        rows: &Rows,
        count: usize,
        panels: std::ops::Range<usize>,
        mut write: impl FnMut(usize, usize, &[f32]),
    ) {
        let Self { layout, packed, bias, engine } = *self;
        if let Some(found) = layout.streams {
            return streams::run(self, found, rows, count, panels, write);
        }
        let mut results = Results([0.0; GROUP * FEW * PANEL]);
        for p in panels.clone().step_by(GROUP) {
            let n = GROUP.min(panels.end - p);
            let bytes = &packed[p * layout.panel..][..n * layout.panel];
            for token in (0..count).step_by(FEW) {
                let few = FEW.min(count - token);
                let out = &mut results.0[..n * few * PANEL];
                engine.run(Panel { layout, bytes, rows, token, out });
                for (i, values) in out.chunks_exact_mut(PANEL).enumerate() {
                    let column = (p + i / few) * PANEL;
                    let values = &mut values[..PANEL.min(layout.outputs - column)];
                    add_bias(values, bias, column);
                    write(token + i % few, column, values);
                }
            }
        }
    }
}

/// Adds the bias of the outputs from `column` on.
fn add_bias(values: &mut [f32], bias: Option<&[f32]>, column: usize) {
    if let Some(bias) = bias {
        values.iter_mut().zip(&bias[column..]).for_each(|(v, b)| *v += b);
    }
}

/// Cuts `0..n` into equal runs that do not overlap, one per thread. The caller takes the first run, and each other run
/// always goes to the same thread. Its data are then in that core's cache when the same weight comes again.
fn share(n: usize, execution: &Execution<'_>, work: impl Fn(std::ops::Range<usize>) + Sync) -> Result<()> {
    let of = number(execution.threads);
    if of == 1 {
        work(0..n);
        return Ok(());
    }
    let run = |i: usize| work(n * i / of..n * (i + 1) / of);
    pool(of - 1)?.in_place_scope(|scope| {
        scope.spawn_broadcast(|_, thread| run(thread.index() + 1));
        run(0);
    });
    Ok(())
}

/// Results that several threads write, each into different columns.
struct Columns<'a> {
    to: Target<'a>,
    tokens: usize,
    outputs: usize,
}

enum Target<'a> {
    F32(Disjoint<'a, f32>),
    Bf16(Disjoint<'a, u16>),
}

impl<'a> Columns<'a> {
    fn of(out: Outputs<'a>, tokens: usize, outputs: usize) -> Result<Self> {
        let (len, to) = match out {
            Outputs::F32(out) => (out.len(), Target::F32(Disjoint::over(out))),
            Outputs::Bf16(out) => (out.len(), Target::Bf16(Disjoint::over(out))),
        };
        if len != dims::product("results", tokens, outputs)? {
            return Err(Error::shape("results", format!("{tokens} x {outputs}"), format!("{len} values")));
        }
        Ok(Self { to, tokens, outputs })
    }

    /// Writes part of a row, the columns from `first` on.
    ///
    /// # Safety
    /// No other thread writes the same columns before all have ended.
    #[allow(unsafe_code)] // as `Disjoint`
    unsafe fn write(&self, token: usize, first: usize, values: &[f32]) {
        assert!(token < self.tokens && first <= self.outputs && values.len() <= self.outputs - first);
        let at = token * self.outputs + first;
        match &self.to {
            // SAFETY: these are columns of one row, as was just asserted, and the caller's alone. Nobody reads the results
            // before all threads have ended.
            Target::F32(to) => unsafe { to.write(at, values) },
            Target::Bf16(to) => {
                let mut bits = [0; PANEL];
                for (i, values) in values.chunks(PANEL).enumerate() {
                    let bits = &mut bits[..values.len()];
                    bits.iter_mut().zip(values).for_each(|(b, &v)| *b = bf16::from_f32(v).to_bits());
                    // SAFETY: as above.
                    unsafe { to.write(at + i * PANEL, bits) };
                }
            }
        }
    }
}
