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

pub use activations::{Inputs, Precision};
pub use engine::Engine;
pub use layout::{Grid, Layout, ScaleFormat, PANEL};
pub use pack::{pack, rows, unpack, Codes};
pub use read::read;

use half::bf16;

use crate::execution::{number, pool};
use crate::simd::Isa;
use crate::{dims, Error, Execution, Result};
pub(crate) use activations::Rows;
use tile::Panel;

/// Tokens whose activations are quantized at once.
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
pub fn multiply(
    layout: &Layout,
    packed: &[u8],
    x: Inputs<'_>,
    bias: Option<&[f32]>,
    mut out: Outputs<'_>,
    plan: &Plan<'_>,
) -> Result<()> {
    layout.check(packed)?;
    let (outputs, tokens) = (layout.grid.outputs, x.tokens(layout.grid.inputs)?);
    if let Some(bias) = bias {
        dims::check_matrix("the bias", bias, 1, outputs)?;
    }
    let columns = Columns::of(&mut out, tokens, outputs)?;
    if let Some(found) = layout.streams {
        return streams::multiply(layout, found, packed, x, bias, &columns, plan);
    }
    let chunk = tokens.min(TOKENS);
    let mut rows = Rows::new(layout, chunk, plan.precision, plan.engine.order(chunk))?;
    let isa = Isa::best();
    for first in (0..tokens).step_by(TOKENS) {
        plan.execution.check()?;
        let count = TOKENS.min(tokens - first);
        rows.fill(layout, x, first..first + count, isa);
        let weight = Weight { layout, packed, bias, engine: plan.engine };
        share(layout.n_panels(), &plan.execution, |panels| {
            weight.run(&rows, count, panels, |token, column, values| {
                columns.write(first + token, column, values);
            });
        })?;
    }
    Ok(())
}

/// A packed weight in panels, and what multiplies with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weight<'a> {
    pub(crate) layout: &'a Layout,
    pub(crate) packed: &'a [u8],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) engine: Engine,
}

impl Weight<'_> {
    /// Multiplies some panels by the first `count` of the tokens; `write` is given a token, the first of some outputs, and
    /// their values.
    pub(crate) fn run(
        &self,
        rows: &Rows,
        count: usize,
        panels: std::ops::Range<usize>,
        mut write: impl FnMut(usize, usize, &[f32]),
    ) {
        let Self { layout, packed, bias, engine } = *self;
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
                    let values = &mut values[..PANEL.min(layout.grid.outputs - column)];
                    if let Some(bias) = bias {
                        values.iter_mut().zip(&bias[column..]).for_each(|(v, b)| *v += b);
                    }
                    write(token + i % few, column, values);
                }
            }
        }
    }
}

/// Cuts `0..n` into equal runs, one per thread. The caller takes the first, and each of the others always goes to the same
/// thread: what it reads is in that core's cache when the same weight comes again.
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

/// Results that several threads write, each in columns of its own.
struct Columns<'a> {
    to: Target,
    tokens: usize,
    outputs: usize,
    slice: std::marker::PhantomData<&'a mut [u8]>,
}

#[derive(Clone, Copy)]
enum Target {
    F32(*mut f32),
    Bf16(*mut u16),
}

#[allow(unsafe_code)] // threads write different columns of the same rows, which no slice can say
                      // SAFETY: `write` is the only use of the pointers, and its callers write different columns.
unsafe impl Sync for Columns<'_> {}

impl<'a> Columns<'a> {
    fn of(out: &'a mut Outputs<'_>, tokens: usize, outputs: usize) -> Result<Self> {
        let (len, to) = match out {
            Outputs::F32(out) => (out.len(), Target::F32(out.as_mut_ptr())),
            Outputs::Bf16(out) => (out.len(), Target::Bf16(out.as_mut_ptr())),
        };
        if len != dims::product("results", tokens, outputs)? {
            return Err(Error::shape("results", format!("{tokens} x {outputs}"), format!("{len} values")));
        }
        Ok(Self { to, tokens, outputs, slice: std::marker::PhantomData })
    }

    /// Writes part of a row; no two threads may be given the same columns.
    #[allow(unsafe_code)] // see above
    fn write(&self, token: usize, first: usize, values: &[f32]) {
        assert!(token < self.tokens && first + values.len() <= self.outputs);
        let at = token * self.outputs + first;
        for (i, &value) in values.iter().enumerate() {
            // SAFETY: `of` has compared the slice's length with the shape, and the assertion keeps within that.
            unsafe {
                match self.to {
                    Target::F32(to) => to.add(at + i).write(value),
                    Target::Bf16(to) => to.add(at + i).write(bf16::from_f32(value).to_bits()),
                }
            }
        }
    }
}
