//! A looped decoder as one program: blocks, norms and adapters in the order in which a token passes through them, with
//! keys and values kept for each block each time that it runs.
//!
//! Products are those of [`matmul`](crate::matmul), with the same bits; what lies between them is float32, in a fixed
//! order of operations. So a result has the same bits on any instruction set and any number of threads. Threads are
//! woken once a call, meet five times a block, and always multiply the same outputs, whose codes stay in their caches
//! from step to step.

mod cache;
mod team;
mod vector;

use crate::matmul::{Engine, Inputs, Layout, Precision, Rows, Weight};
use crate::memory::zeros;
use crate::simd::Isa;
use crate::{dims, Error, Execution, Result};
use cache::{Cache, KeyValue};
use team::{together, Board, Member};
use vector::{gated, norm, opened, rotate, rows, Half};

/// What a weight is made of; which one it is, is known by its number.
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
}

/// `y = x / sqrt(mean(x^2) + epsilon) * weight`.
#[derive(Clone, Debug)]
pub struct Norm {
    /// As long as what it is applied to.
    pub weight: Vec<f32>,
    /// Added to the mean.
    pub epsilon: f32,
}

/// Norms of a branch: `x = stream(x + branch(f(input(x))))`, each where there is one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Norms {
    /// Before the branch.
    pub input: Option<usize>,
    /// After it.
    pub branch: Option<usize>,
    /// After the sum.
    pub stream: Option<usize>,
}

/// Attention, then a gated MLP.
#[derive(Clone, Debug)]
pub struct Block {
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values; a divisor of `heads`.
    pub kv_heads: usize,
    /// Width of a head; even.
    pub head: usize,
    /// Whether neighbours are turned by a position, or the halves of a head.
    pub neighbours: bool,
    /// What a query is multiplied by.
    pub scale: f32,
    /// Weights whose outputs, one after another, are all queries, all keys, all values, and all gates.
    pub qkv: Vec<usize>,
    /// Whether there are gates: one for each number attended to, which is multiplied by its sigmoid.
    pub gates: bool,
    /// Added to queries and keys before anything else: `(heads + kv_heads) x head`, or nothing.
    pub qk_bias: Vec<f32>,
    /// Norms of each query and key, before they are turned.
    pub qk_norms: Option<[usize; 2]>,
    /// Weight behind attention.
    pub out: usize,
    /// Weights whose outputs, one after another, are the gates, then what they multiply.
    pub gate_up: Vec<usize>,
    /// Weight behind the gate.
    pub down: usize,
    /// Norms of attention and of the MLP.
    pub norms: [Norms; 2],
}

/// States that a program can keep.
pub const KEPT: usize = 2;

/// One step of a program, on the state `x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A block; each time that one runs has a cache of its own.
    Block(usize),
    /// A norm.
    Norm(usize),
    /// Keeps `x` under a number below [`KEPT`].
    Keep(usize),
    /// `x` is what was kept.
    Take(usize),
    /// Adds what was kept to `x`.
    Add(usize),
    /// Begins anew with the state given, `x = s`.
    Start,
    /// `x = W [x; e]`, `e` what was kept under 0.
    Adapter(usize),
}

/// A decoder's structure; weights and norms are known by their numbers.
#[derive(Clone, Debug)]
pub struct Program {
    /// Width of the state.
    pub width: usize,
    /// Outputs and inputs of every weight.
    pub shapes: Vec<[usize; 2]>,
    /// All norms.
    pub norms: Vec<Norm>,
    /// All blocks.
    pub blocks: Vec<Block>,
    /// What happens to a token, from its embedding to the state that the head reads.
    pub order: Vec<Op>,
    /// Weight that gives logits.
    pub head: usize,
    /// How finely activations enter products with codes.
    pub precision: Precision,
    /// Whether keys and values are kept as bfloat16, or as float32.
    pub half: bool,
}

/// Tokens that a call goes on by.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Embeddings, (tokens, width).
    pub x: &'a [f32],
    /// States to begin the loop with, (tokens, width), where a program has [`Op::Start`].
    pub start: Option<&'a [f32]>,
    /// (cos, sin) of every position so far, these included: (positions, head / 2, 2).
    pub angles: &'a [f32],
}

impl Program {
    fn check(&self) -> Result<()> {
        let shape = |i: usize| {
            self.shapes.get(i).copied().ok_or_else(|| Error::shape("a weight's number", self.shapes.len(), i))
        };
        let expect = |what: &'static str, found: [usize; 2], expected: [usize; 2]| {
            if found == expected {
                return Ok(());
            }
            Err(Error::shape(what, format!("{expected:?}"), format!("{found:?}")))
        };
        let has_norm = |i: usize, len: usize| match self.norms.get(i) {
            Some(norm) if norm.weight.len() == len => Ok(()),
            Some(norm) => Err(Error::shape("a norm", len, norm.weight.len())),
            None => Err(Error::shape("a norm's number", self.norms.len(), i)),
        };
        for block in &self.blocks {
            let Block { heads, kv_heads, head, .. } = *block;
            if kv_heads == 0 || head == 0 || !heads.is_multiple_of(kv_heads) || !head.is_multiple_of(2) {
                let got = format!("{heads}, {kv_heads}, {head}");
                return Err(Error::shape(
                    "heads, key/value heads, width of a head",
                    "a multiple, 1.., even",
                    got,
                ));
            }
            let together = |parts: &[usize]| {
                parts.iter().try_fold(0, |sum, &i| {
                    let [outputs, inputs] = shape(i)?;
                    expect("a block's weight", [outputs, inputs], [outputs, self.width])?;
                    Ok(sum + outputs)
                })
            };
            let queries = dims::product("queries", heads, head)?;
            let keys = kv_heads * head;
            let gates = if block.gates { queries } else { 0 };
            expect("q, k, v and gates", [together(&block.qkv)?, 0], [queries + 2 * keys + gates, 0])?;
            expect("the weight behind attention", shape(block.out)?, [self.width, queries])?;
            let gates = together(&block.gate_up)? / 2;
            expect("the weight behind the gate", shape(block.down)?, [self.width, gates])?;
            if !block.qk_bias.is_empty() {
                dims::check_matrix("the bias of q and k", &block.qk_bias, heads + kv_heads, head)?;
            }
            for i in block.qk_norms.into_iter().flatten() {
                has_norm(i, head)?;
            }
            for norms in block.norms {
                for i in [norms.input, norms.branch, norms.stream].into_iter().flatten() {
                    has_norm(i, self.width)?;
                }
            }
        }
        for op in &self.order {
            match *op {
                Op::Block(i) if i >= self.blocks.len() => {
                    return Err(Error::shape("a block's number", self.blocks.len(), i));
                }
                Op::Norm(i) => has_norm(i, self.width)?,
                Op::Keep(i) | Op::Take(i) | Op::Add(i) if i >= KEPT => {
                    return Err(Error::shape("the number of a state kept", format!("0 to {}", KEPT - 1), i));
                }
                Op::Adapter(i) => expect("the adapter", shape(i)?, [self.width, 2 * self.width])?,
                _ => {}
            }
        }
        expect("the head", [shape(self.head)?[1], 0], [self.width, 0])
    }

    /// Outputs of some weights together.
    fn outputs(&self, parts: &[usize]) -> usize {
        parts.iter().map(|&i| self.shapes[i][0]).sum()
    }
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
        let cache = Cache::new(&program);
        Ok(Self { program, cache })
    }

    /// Tokens whose keys and values it keeps.
    #[must_use]
    pub fn seen(&self) -> usize {
        self.cache.seen
    }

    /// Forgets all tokens.
    pub fn restart(&mut self) {
        self.cache.restart();
    }

    /// Goes on by some tokens; gives the logits of the last ones, as many as `logits` has room for.
    ///
    /// After an error it has forgotten all tokens.
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
        let call = Call {
            program,
            matrices,
            tokens,
            cache: &self.cache,
            count,
            qkv: Board::over(&mut qkv),
            mixed: Board::over(&mut mixed),
            gates: Board::over(&mut gates),
            branch: Board::over(&mut branch),
            logits: Board::over(logits),
            wanted,
            engine: Engine::best(),
        };
        together(execution, |member| call.run(member))?;
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
                if [rows, columns] != [outputs, inputs] || layout.is_streams() {
                    let got = format!("{rows} x {columns}");
                    return Err(Error::shape("codes of a plain grid", format!("{outputs} x {inputs}"), got));
                }
                layout.check(bytes)?;
            }
            Values::F32(values) => dims::check_matrix("a weight", values, outputs, inputs)?,
            Values::Bf16(values) => dims::check_matrix("a weight", values, outputs, inputs)?,
        }
        if let Some(bias) = matrix.bias {
            dims::check_matrix("a bias", bias, 1, outputs)?;
        }
    }
    Ok(())
}

/// What the threads of a call share.
struct Call<'a> {
    program: &'a Program,
    matrices: &'a [Matrix<'a>],
    tokens: &'a Tokens<'a>,
    cache: &'a Cache,
    count: usize,
    qkv: Board,
    mixed: Board,
    gates: Board,
    branch: Board,
    logits: Board,
    wanted: usize,
    engine: Engine,
}

/// What each thread has of its own: all have the same states.
struct State {
    x: Vec<f32>,
    kept: [Vec<f32>; KEPT],
    /// Input of a product.
    input: Vec<f32>,
    slot: usize,
}

impl Call<'_> {
    fn run(&self, member: &Member<'_>) -> Result<()> {
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
                Op::Block(i) => self.block(member, &self.program.blocks[i], &mut state)?,
                Op::Norm(i) => self.norm_in_place(i, &mut state.x),
                Op::Keep(i) => state.kept[i].copy_from_slice(&state.x),
                Op::Take(i) => state.x.copy_from_slice(&state.kept[i]),
                Op::Add(i) => state.x.iter_mut().zip(&state.kept[i]).for_each(|(x, kept)| *x += kept),
                Op::Start => state.x.copy_from_slice(self.tokens.start.unwrap_or(&[])),
                Op::Adapter(i) => self.adapter(member, i, &mut state)?,
            }
        }
        let last = &state.x[(self.count - self.wanted) * self.program.width..];
        self.multiply(member, &[self.program.head], last, &self.logits)
    }

    fn adapter(&self, member: &Member<'_>, weight: usize, state: &mut State) -> Result<()> {
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
        self.multiply(member, &[weight], &state.input, &self.branch)?;
        member.meet()?;
        let size = state.x.len();
        state.x.copy_from_slice(self.branch.read(0..size));
        Ok(())
    }

    fn block(&self, member: &Member<'_>, block: &Block, state: &mut State) -> Result<()> {
        let slot = state.slot;
        state.slot += 1;
        let queries = block.heads * block.head;

        self.enter(block.norms[0], state);
        self.multiply(member, &block.qkv, &state.input[..state.x.len()], &self.qkv)?;
        member.meet()?;
        self.attention(member, block, slot)?;
        member.meet()?;
        self.multiply(member, &[block.out], self.mixed.read(0..self.count * queries), &self.branch)?;
        member.meet()?;
        self.leave(block.norms[0], state);

        self.enter(block.norms[1], state);
        self.multiply(member, &block.gate_up, &state.input[..state.x.len()], &self.gates)?;
        member.meet()?;
        let wide = self.program.shapes[block.down][1];
        let mut input = zeros("inputs of a product", self.count * wide)?;
        let gates = self.gates.read(0..self.count * 2 * wide);
        for (to, both) in input.chunks_exact_mut(wide).zip(gates.chunks_exact(2 * wide)) {
            gated(Isa::best(), &both[..wide], &both[wide..], to);
        }
        self.multiply(member, &[block.down], &input, &self.branch)?;
        member.meet()?;
        self.leave(block.norms[1], state);
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
    fn leave(&self, norms: Norms, state: &mut State) {
        let branch = self.branch.read(0..state.x.len());
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
            self.norm_in_place(i, &mut state.x);
        }
    }

    fn norm(&self, i: usize, x: &[f32], y: &mut [f32]) {
        let Norm { weight, epsilon } = &self.program.norms[i];
        for (x, y) in x.chunks_exact(weight.len()).zip(y.chunks_exact_mut(weight.len())) {
            norm(Isa::best(), x, weight, *epsilon, y);
        }
    }

    fn norm_in_place(&self, i: usize, x: &mut [f32]) {
        let before = x.to_vec();
        self.norm(i, &before, x);
    }

    /// This thread's outputs of some weights that have the same input; they lie side by side in a token's row of `to`.
    fn multiply(&self, member: &Member<'_>, weights: &[usize], x: &[f32], to: &Board) -> Result<()> {
        let stride = self.program.outputs(weights);
        let mut first = 0;
        let mut quantized: Option<(&Layout, Rows)> = None;
        for &i in weights {
            let ([outputs, inputs], matrix) = (self.program.shapes[i], &self.matrices[i]);
            let tokens = x.len() / inputs;
            match matrix.values {
                Values::Codes(layout, packed) => {
                    let rows = match quantized.take() {
                        Some((same, rows)) if same.has_rows_of(layout) => rows,
                        _ => {
                            let order = self.engine.order(tokens);
                            let mut rows = Rows::new(layout, tokens, self.program.precision, order)?;
                            rows.fill(layout, Inputs::F32(x), 0..tokens, Isa::best());
                            rows
                        }
                    };
                    let weight = Weight { layout, packed, bias: matrix.bias, engine: self.engine };
                    weight.run(&rows, tokens, member.part(layout.n_panels()), |token, column, values| {
                        to.write(token * stride + first + column, values);
                    });
                    quantized = Some((layout, rows));
                }
                Values::F32(values) => {
                    let plain = Plain { values, bias: matrix.bias, outputs, inputs };
                    plain.run(member, x, |token, column, y| to.write(token * stride + first + column, y));
                }
                Values::Bf16(bits) => {
                    let plain = Plain { values: Half::slice(bits), bias: matrix.bias, outputs, inputs };
                    plain.run(member, x, |token, column, y| to.write(token * stride + first + column, y));
                }
            }
            first += outputs;
        }
        Ok(())
    }

    /// This thread's heads: keys and values of the new tokens are kept, and their queries attend to all before them.
    fn attention(&self, member: &Member<'_>, block: &Block, slot: usize) -> Result<()> {
        let Block { heads, kv_heads, head, .. } = *block;
        let gates = (heads + 2 * kv_heads) * head;
        let (stride, group) = (self.program.outputs(&block.qkv), heads / kv_heads);
        let mut weights = zeros("attention weights", self.cache.seen + self.count)?;
        let mut out = zeros("values attended to", self.count * group * head)?;
        let mut vector = zeros("a head", head)?;
        for kv in member.part(kv_heads) {
            let mut cached = self.cache.slots[slot][kv].lock().map_err(|_| Error::Interrupted)?;
            for token in 0..self.count {
                let position = self.cache.seen + token;
                let at = token * stride + (heads + kv) * head;
                vector.copy_from_slice(self.qkv.read(at..at + head));
                self.turned(block, heads + kv, position, &mut vector);
                let value = at + kv_heads * head;
                cached.push(&vector, self.qkv.read(value..value + head));
                for h in 0..group {
                    let at = token * stride + (kv * group + h) * head;
                    vector.copy_from_slice(self.qkv.read(at..at + head));
                    self.turned(block, kv * group + h, position, &mut vector);
                    for v in &mut vector {
                        *v *= block.scale;
                    }
                    let to = &mut out[(token * group + h) * head..][..head];
                    cached.attend(&vector, &mut weights[..=position], to);
                    if block.gates {
                        let at = token * stride + gates + (kv * group + h) * head;
                        opened(Isa::best(), self.qkv.read(at..at + head), to);
                    }
                }
            }
            for (token, out) in out.chunks_exact(group * head).enumerate() {
                self.mixed.write((token * heads + kv * group) * head, out);
            }
        }
        Ok(())
    }

    /// A query or key with its bias and norm, turned by its position.
    fn turned(&self, block: &Block, number: usize, position: usize, x: &mut [f32]) {
        let head = block.head;
        if let Some(bias) = block.qk_bias.get(number * head..(number + 1) * head) {
            x.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
        }
        if let Some(norms) = block.qk_norms {
            self.norm_in_place(norms[usize::from(number >= block.heads)], x);
        }
        rotate(x, &self.tokens.angles[position * head..(position + 1) * head], block.neighbours);
    }
}

/// A weight that is no codes.
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
