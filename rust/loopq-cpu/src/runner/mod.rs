//! A looped decoder as one program: blocks, norms and adapters in the order in which a token passes through them. Each
//! run of a block keeps its own keys and values.
//!
//! Products are those of [`matmul`](crate::matmul), with the same bits. Everything between them is float32 in a fixed
//! order of operations. So a result has the same bits on any instruction set and any number of threads. Threads are
//! woken once a call and meet five times a block. Each always multiplies the same outputs, so their codes stay in its
//! caches from step to step.

mod cache;
mod coded;
mod program;
mod team;
mod transform;
mod vector;

pub use program::{Block, Kind, Norm, Norms, Op, Program, KEPT};
pub use transform::{Factor, Transform};

use std::borrow::Cow;

use crate::disjoint::Disjoint;
use crate::matmul::{Engine, Inputs, Layout, Rows, Weight};
use cache::Cache;
use loopq_core::memory::zeros;
use loopq_core::simd::Isa;
use loopq_core::{dims, Error, Execution, Result};
use team::{together, Member};
use vector::{gated, norm, opened, rotate, rows, Half, Room};

/// The elements of a weight; the program refers to weights by number.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// Packed codes.
    Codes(&'a Layout, &'a [u8]),
    /// float32, row-major.
    F32(&'a [f32]),
    /// The bits of bfloat16 numbers, row-major.
    Bf16(&'a [u16]),
}

/// A weight, (outputs, inputs).
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// Codes or numbers.
    pub values: Values<'a>,
    /// Added to each result.
    pub bias: Option<&'a [f32]>,
    /// Applied to inputs first. Weights that share inputs share its result if they refer to the same one.
    pub transform: Option<&'a Transform>,
}

impl Matrix<'_> {
    fn has_basis_of(&self, other: &Self) -> bool {
        self.transform.map(std::ptr::from_ref) == other.transform.map(std::ptr::from_ref)
    }
}

/// The new tokens of a call.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Embeddings, (tokens, width).
    pub x: &'a [f32],
    /// Initial states of the loop, (tokens, width), for programs with [`Op::Start`].
    pub start: Option<&'a [f32]>,
    /// (cos, sin) of every position, including the new ones: (positions, head / 2, 2).
    pub angles: &'a [f32],
}

/// A program with the keys and values of the tokens so far.
#[derive(Debug)]
pub struct Runner {
    program: Program,
    cache: Cache,
}

impl Runner {
    /// A runner that has seen nothing.
    pub fn new(program: Program) -> Result<Self> {
        program.check()?;
        let cache = Cache::new(&program)?;
        Ok(Self { program, cache })
    }

    /// Number of tokens with stored keys and values.
    #[must_use]
    pub fn seen(&self) -> usize {
        self.cache.seen
    }

    /// Forgets all tokens.
    pub fn restart(&mut self) {
        self.cache.restart();
    }

    /// Runs some more tokens and writes the logits of the last ones, as many as `logits` has room for.
    ///
    /// After an error no tokens are kept.
    pub fn run(
        &mut self,
        matrices: &[Matrix<'_>],
        tokens: &Tokens<'_>,
        logits: &mut [f32],
        execution: &Execution<'_>,
    ) -> Result<()> {
        let done = self.checked_run(matrices, tokens, logits, execution);
        if done.is_err() {
            self.restart();
        }
        done
    }

    #[allow(unsafe_code)] // threads share buffers: see `Call`
    fn checked_run(
        &mut self,
        matrices: &[Matrix<'_>],
        tokens: &Tokens<'_>,
        logits: &mut [f32],
        execution: &Execution<'_>,
    ) -> Result<()> {
        let program = &self.program;
        check_matrices(program, matrices)?;
        let count = tokens.x.len() / program.width;
        dims::check_matrix("embeddings", tokens.x, count, program.width)?;
        match tokens.start {
            Some(start) => dims::check_matrix("states to begin with", start, count, program.width)?,
            None if program.order.contains(&Op::Start) => {
                return Err(Error::shape("states to begin with", "one for each token", "none"));
            }
            None => {}
        }
        let seen = self.cache.seen;
        let head = program.blocks.iter().map(|b| b.head).max().unwrap_or(0);
        let angles = dims::product("angles", seen + count, head)?;
        if program.blocks.iter().any(|b| b.head != head) || tokens.angles.len() < angles {
            return Err(Error::shape("angles", angles, tokens.angles.len()));
        }
        let vocabulary = program.shapes[program.head][0];
        let wanted = logits.len() / vocabulary;
        dims::check_matrix("logits", logits, wanted, vocabulary)?;
        if wanted > count {
            return Err(Error::shape("tokens with logits", format!("at most {count}"), wanted));
        }
        self.cache.reserve(count)?;
        let widest = |of: fn(&Program, &Block) -> usize| {
            dims::product(
                "activations",
                count,
                program.blocks.iter().map(|b| of(program, b)).max().unwrap_or(0),
            )
        };
        let mut qkv = zeros("queries, keys and values", widest(|p, b| p.outputs(&b.qkv))?)?;
        let mut mixed = zeros("values attended to", widest(|p, b| p.shapes[b.out][1])?)?;
        let mut gates = zeros("gates", widest(|p, b| p.outputs(&b.gate_up))?)?;
        let mut branch = zeros("a branch", dims::product("a branch", count, program.width)?)?;
        let turned = matrices.iter().filter_map(|m| m.transform).map(Transform::inputs).max().unwrap_or(0);
        let mut turned = zeros("transformed inputs", dims::product("transformed inputs", count, turned)?)?;
        let call = Call {
            program,
            matrices,
            tokens,
            cache: &self.cache,
            count,
            qkv: Disjoint::over(&mut qkv),
            mixed: Disjoint::over(&mut mixed),
            gates: Disjoint::over(&mut gates),
            branch: Disjoint::over(&mut branch),
            turned: Disjoint::over(&mut turned),
            logits: Disjoint::over(logits),
            wanted,
            engine: Engine::best(),
        };
        // SAFETY: `together` gives each thread a different member of a team that runs nothing else.
        together(execution, |member| unsafe { call.run(member) })?;
        self.cache.seen += count;
        Ok(())
    }
}

fn check_matrices(program: &Program, matrices: &[Matrix<'_>]) -> Result<()> {
    if matrices.len() != program.shapes.len() {
        return Err(Error::shape("weights", program.shapes.len(), matrices.len()));
    }
    for (matrix, &[outputs, inputs]) in matrices.iter().zip(&program.shapes) {
        match matrix.values {
            Values::Codes(layout, bytes) => {
                let [rows, columns] = layout.shape();
                if [rows, columns] != [outputs, inputs] {
                    let got = format!("{rows} x {columns}");
                    return Err(Error::shape("codes", format!("{outputs} x {inputs}"), got));
                }
                layout.check(bytes)?;
            }
            Values::F32(values) => dims::check_matrix("a weight", values, outputs, inputs)?,
            Values::Bf16(values) => dims::check_matrix("a weight", values, outputs, inputs)?,
        }
        if let Some(bias) = matrix.bias {
            dims::check_matrix("a bias", bias, 1, outputs)?;
        }
        if let Some(transform) = matrix.transform.filter(|t| t.inputs() != inputs) {
            return Err(Error::shape("inputs of an input transform", inputs, transform.inputs()));
        }
    }
    Ok(())
}

/// State shared by the threads of a call.
///
/// The buffers are written and read in turns. All members run the same steps, so they meet at the same places. Between
/// two meetings a buffer is either read, or written by each member in different outputs or heads:
///
/// | between meetings | written | read |
/// |---|---|---|
/// | a block begins | `qkv` | `branch`, of the step before |
/// | attention | `mixed` | `qkv` |
/// | behind attention | `branch` | `mixed` |
/// | the MLP begins | `gates` | `branch` |
/// | behind the gate | `branch` | `gates` |
/// | an adapter, between its two meetings | `branch` | |
/// | inputs of several tokens are transformed, between its two meetings | `turned` | |
/// | products with these inputs | | `turned` |
/// | the head | `logits` | `branch`, of the last step |
struct Call<'a> {
    program: &'a Program,
    matrices: &'a [Matrix<'a>],
    tokens: &'a Tokens<'a>,
    cache: &'a Cache,
    count: usize,
    qkv: Disjoint<'a, f32>,
    mixed: Disjoint<'a, f32>,
    gates: Disjoint<'a, f32>,
    branch: Disjoint<'a, f32>,
    turned: Disjoint<'a, f32>,
    logits: Disjoint<'a, f32>,
    wanted: usize,
    engine: Engine,
}

/// Private state of a thread: all threads hold the same states.
struct State {
    x: Vec<f32>,
    kept: [Vec<f32>; KEPT],
    /// Input of a product.
    input: Vec<f32>,
    slot: usize,
}

#[allow(unsafe_code)] // who writes and reads what, and when: the table above
impl Call<'_> {
    /// Takes a member through the program.
    ///
    /// # Safety
    /// Each member of one team calls this once.
    unsafe fn run(&self, member: &Member<'_>) -> Result<()> {
        let size = self.count * self.program.width;
        let mut state = State {
            x: zeros("states", size)?,
            kept: [zeros("states", size)?, zeros("states", size)?],
            input: zeros("inputs of a product", 2 * size)?,
            slot: 0,
        };
        state.x.copy_from_slice(self.tokens.x);
        for op in &self.program.order {
            match *op {
                // SAFETY: all members do the same steps.
                Op::Block(i) => unsafe { self.block(member, &self.program.blocks[i], &mut state)? },
                Op::Norm(i) => self.norm_in_place(i, &mut state.x, &mut state.input),
                Op::Keep(i) => state.kept[i].copy_from_slice(&state.x),
                Op::Take(i) => state.x.copy_from_slice(&state.kept[i]),
                Op::Add(i) => state.x.iter_mut().zip(&state.kept[i]).for_each(|(x, kept)| *x += kept),
                Op::Start => state.x.copy_from_slice(self.tokens.start.unwrap_or(&[])),
                // SAFETY: as above.
                Op::Adapter(i) => unsafe { self.adapter(member, i, &mut state)? },
            }
        }
        let last = &state.x[(self.count - self.wanted) * self.program.width..];
        // SAFETY: all members multiply by the head, and nobody reads the logits before all have ended.
        unsafe { self.multiply(member, &[self.program.head], last, &self.logits) }
    }

    /// # Safety
    /// All members of the team call this, after the same steps.
    unsafe fn adapter(&self, member: &Member<'_>, weight: usize, state: &mut State) -> Result<()> {
        let width = self.program.width;
        for (to, (x, e)) in state
            .input
            .chunks_exact_mut(2 * width)
            .zip(state.x.chunks_exact(width).zip(state.kept[0].chunks_exact(width)))
        {
            to[..width].copy_from_slice(x);
            to[width..].copy_from_slice(e);
        }
        // Others may still read the branch of the block before.
        member.meet()?;
        // SAFETY: all members come here between the same two meetings, and none reads the branch there.
        unsafe { self.multiply(member, &[weight], &state.input, &self.branch)? };
        member.meet()?;
        let size = state.x.len();
        // SAFETY: written before the meeting; the next write comes after another one.
        state.x.copy_from_slice(unsafe { self.branch.read(0..size) });
        Ok(())
    }

    /// # Safety
    /// All members of the team call this, after the same steps.
    unsafe fn block(&self, member: &Member<'_>, block: &Block, state: &mut State) -> Result<()> {
        let slot = state.slot;
        state.slot += 1;
        let queries = block.heads * block.head;

        self.enter(block.norms[0], state);
        // SAFETY: all members come here after the same meeting. The last to read `qkv` was the attention of a block before,
        // with meetings since.
        unsafe { self.multiply(member, &block.qkv, &state.input[..state.x.len()], &self.qkv)? };
        member.meet()?;
        // SAFETY: `qkv` is written, and the last to read `mixed` was a block before, with meetings since.
        unsafe { self.attention(member, block, slot)? };
        member.meet()?;
        // SAFETY: `mixed` is written, and the last to read `branch` was the step before, with meetings since.
        unsafe {
            let mixed = self.mixed.read(0..self.count * queries);
            self.multiply(member, &[block.out], mixed, &self.branch)?;
        }
        member.meet()?;
        // SAFETY: `branch` is written, and written again after the next meeting only.
        unsafe { self.leave(block.norms[0], state) };

        self.enter(block.norms[1], state);
        // SAFETY: the last to read `gates` was a block before, with meetings since.
        unsafe { self.multiply(member, &block.gate_up, &state.input[..state.x.len()], &self.gates)? };
        member.meet()?;
        let wide = self.program.shapes[block.down][1];
        let mut input = zeros("inputs of a product", self.count * wide)?;
        // SAFETY: `gates` is written, and written again by another block only, with meetings between.
        let gates = unsafe { self.gates.read(0..self.count * 2 * wide) };
        for (to, both) in input.chunks_exact_mut(wide).zip(gates.chunks_exact(2 * wide)) {
            gated(Isa::best(), &both[..wide], &both[wide..], to);
        }
        // SAFETY: all members have read `branch` before the last meeting.
        unsafe { self.multiply(member, &[block.down], &input, &self.branch)? };
        member.meet()?;
        // SAFETY: `branch` is written, and written again after another meeting only.
        unsafe { self.leave(block.norms[1], state) };
        Ok(())
    }

    /// Input of a branch.
    fn enter(&self, norms: Norms, state: &mut State) {
        let input = &mut state.input[..state.x.len()];
        match norms.input {
            Some(i) => self.norm(i, &state.x, input),
            None => input.copy_from_slice(&state.x),
        }
    }

    /// Adds a branch to the state.
    ///
    /// # Safety
    /// The branch was written before the last meeting, and is not written before the next one.
    unsafe fn leave(&self, norms: Norms, state: &mut State) {
        // SAFETY: the caller's.
        let branch = unsafe { self.branch.read(0..state.x.len()) };
        let branch = match norms.branch {
            Some(i) => {
                let normed = &mut state.input[..state.x.len()];
                self.norm(i, branch, normed);
                normed
            }
            None => branch,
        };
        for (x, branch) in state.x.iter_mut().zip(branch) {
            *x += branch;
        }
        if let Some(i) = norms.stream {
            self.norm_in_place(i, &mut state.x, &mut state.input);
        }
    }

    fn norm(&self, i: usize, x: &[f32], y: &mut [f32]) {
        let Norm { weight, epsilon } = &self.program.norms[i];
        for (x, y) in x.chunks_exact(weight.len()).zip(y.chunks_exact_mut(weight.len())) {
            norm(Isa::best(), x, weight, *epsilon, y);
        }
    }

    fn norm_in_place(&self, i: usize, x: &mut [f32], scratch: &mut [f32]) {
        let before = &mut scratch[..x.len()];
        before.copy_from_slice(x);
        self.norm(i, before, x);
    }

    /// This thread's outputs of some weights that have the same input; they lie side by side in a token's row of `to`.
    ///
    /// # Safety
    /// All members call this with the same weights and `to`, which nobody reads or writes otherwise between the last
    /// meeting and the next one.
    unsafe fn multiply(
        &self,
        member: &Member<'_>,
        weights: &[usize],
        x: &[f32],
        to: &Disjoint<'_, f32>,
    ) -> Result<()> {
        let stride = self.program.outputs(weights);
        // SAFETY: each output belongs to the part of one member, and no two outputs lie at the same place in a row.
        let write = |at: usize, values: &[f32]| unsafe { to.write(at, values) };
        let mut first = 0;
        let mut transformed: Option<(&Matrix<'_>, Cow<'_, [f32]>)> = None;
        let mut quantized: Option<(&Matrix<'_>, &Layout, Rows)> = None;
        for &i in weights {
            let ([outputs, inputs], matrix) = (self.program.shapes[i], &self.matrices[i]);
            let x = match matrix.transform {
                Some(transform) => {
                    let values = match transformed.take() {
                        Some((of, values)) if of.has_basis_of(matrix) => values,
                        // SAFETY: all members come here, and what the one before gave is not used any more.
                        _ => unsafe { self.transformed(member, transform, x)? },
                    };
                    &transformed.insert((matrix, values)).1
                }
                None => x,
            };
            let tokens = x.len() / inputs;
            match matrix.values {
                Values::Codes(layout, packed) => {
                    let rows = match quantized.take() {
                        Some((of, same, rows)) if of.has_basis_of(matrix) && same.has_rows_of(layout) => rows,
                        _ => {
                            let order = self.engine.order(layout, tokens);
                            let mut rows = Rows::new(layout, tokens, self.program.precision, order)?;
                            rows.fill(layout, Inputs::F32(x), 0..tokens, Isa::best());
                            rows
                        }
                    };
                    let weight = Weight { layout, packed, bias: matrix.bias, engine: self.engine };
                    weight.run(&rows, tokens, member.part(layout.n_panels()), |token, column, values| {
                        write(token * stride + first + column, values);
                    });
                    quantized = Some((matrix, layout, rows));
                }
                Values::F32(values) => {
                    let plain = Plain { values, bias: matrix.bias, outputs, inputs };
                    plain.run(member, x, |token, column, y| write(token * stride + first + column, y));
                }
                Values::Bf16(bits) => {
                    let plain = Plain { values: Half::slice(bits), bias: matrix.bias, outputs, inputs };
                    plain.run(member, x, |token, column, y| write(token * stride + first + column, y));
                }
            }
            first += outputs;
        }
        Ok(())
    }

    /// Transformed inputs. Each thread transforms a token alone, because a meeting takes as long. Of several tokens it
    /// transforms its part.
    ///
    /// # Safety
    /// All members call this with the same arguments, and no longer use what the call before gave.
    unsafe fn transformed(
        &self,
        member: &Member<'_>,
        transform: &Transform,
        x: &[f32],
    ) -> Result<Cow<'_, [f32]>> {
        let inputs = transform.inputs();
        if x.len() == inputs {
            return Ok(Cow::Owned(transform.apply(x, Isa::best())?));
        }
        let part = member.part(x.len() / inputs);
        let own = transform.apply(&x[part.start * inputs..part.end * inputs], Isa::best())?;
        // Others may still read what the call before gave.
        member.meet()?;
        // SAFETY: these tokens are in this member's part alone, and nobody reads them before all have met again.
        unsafe { self.turned.write(part.start * inputs, &own) };
        member.meet()?;
        // SAFETY: written before the meeting. Before anybody writes again all meet, and do not use this any more.
        Ok(Cow::Borrowed(unsafe { self.turned.read(0..x.len()) }))
    }

    /// This thread's heads: keys and values of the new tokens are kept, and their queries attend to all before them.
    ///
    /// # Safety
    /// All members call this between the same two meetings. `qkv` was written before the first meeting and is not
    /// written before the second. Nobody else reads or writes `mixed` between them.
    unsafe fn attention(&self, member: &Member<'_>, block: &Block, slot: usize) -> Result<()> {
        let Block { heads, kv_heads, head, .. } = *block;
        let (stride, group) = (self.program.outputs(&block.qkv), heads / kv_heads);
        // SAFETY: nobody writes these before the next meeting, as the caller promises.
        let qkv = |at: usize| unsafe { self.qkv.read(at..at + head) };
        let mut room = Room::new(group, head, self.cache.seen + self.count)?;
        let mut out = zeros("values attended to", self.count * group * head)?;
        let [mut key, mut value, mut scratch] =
            [zeros("a head", head)?, zeros("a head", head)?, zeros("a head", head)?];
        let mut queries = zeros("queries", group * head)?;
        for kv in member.part(kv_heads) {
            let mut cached = self.cache.slots[slot][kv].lock().map_err(|_| Error::Interrupted)?;
            for (token, to) in out.chunks_exact_mut(group * head).enumerate() {
                let position = self.cache.seen + token;
                let at = |h: usize| token * stride + h * head;
                key.copy_from_slice(qkv(at(heads + kv)));
                self.turned(block, heads + kv, position, &mut key, &mut scratch);
                value.copy_from_slice(qkv(at(heads + kv_heads + kv)));
                cached.push(&mut key, &mut value);
                for (h, query) in queries.chunks_exact_mut(head).enumerate() {
                    query.copy_from_slice(qkv(at(kv * group + h)));
                    self.turned(block, kv * group + h, position, query, &mut scratch);
                    for v in query.iter_mut() {
                        *v *= block.scale;
                    }
                }
                cached.attend(&mut queries, room.first(position + 1), to);
                if block.gates {
                    for (h, to) in to.chunks_exact_mut(head).enumerate() {
                        opened(Isa::best(), qkv(at(heads + 2 * kv_heads + kv * group + h)), to);
                    }
                }
            }
            for (token, out) in out.chunks_exact(group * head).enumerate() {
                // SAFETY: these heads belong to `kv`, which is in this member's part alone.
                unsafe { self.mixed.write((token * heads + kv * group) * head, out) };
            }
        }
        Ok(())
    }

    /// A query or key with its bias and norm, turned by its position.
    fn turned(&self, block: &Block, number: usize, position: usize, x: &mut [f32], scratch: &mut [f32]) {
        let head = block.head;
        if let Some(bias) = block.qk_bias.get(number * head..(number + 1) * head) {
            x.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
        }
        if let Some(norms) = block.qk_norms {
            self.norm_in_place(norms[usize::from(number >= block.heads)], x, scratch);
        }
        rotate(x, &self.tokens.angles[position * head..(position + 1) * head], block.neighbours);
    }
}

/// A weight without codes.
struct Plain<'a, T> {
    values: &'a [T],
    bias: Option<&'a [f32]>,
    outputs: usize,
    inputs: usize,
}

/// Outputs that are multiplied by all tokens while they are in cache, a whole number of lines of a result.
const OUTPUTS: usize = 16;

impl<T: vector::Number> Plain<'_, T> {
    fn run(&self, member: &Member<'_>, x: &[f32], mut write: impl FnMut(usize, usize, &[f32])) {
        let part = member.part(self.outputs);
        let mut values = [0.0; OUTPUTS];
        for first in part.clone().step_by(OUTPUTS) {
            let n = OUTPUTS.min(part.end - first);
            let weights = &self.values[first * self.inputs..(first + n) * self.inputs];
            for (token, x) in x.chunks_exact(self.inputs).enumerate() {
                rows(Isa::best(), weights, x, &mut values[..n]);
                if let Some(bias) = self.bias {
                    values.iter_mut().zip(&bias[first..first + n]).for_each(|(v, b)| *v += b);
                }
                write(token, first, &values[..n]);
            }
        }
    }
}
