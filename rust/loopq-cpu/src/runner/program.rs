//! A decoder's structure and its checks.

use crate::matmul::Precision;
use loopq_core::{dims, Error, Result};

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Numbers.
    F32,
    /// Numbers, rounded.
    Bf16,
    /// Codes of eight bits in blocks with a scale.
    Eight,
    /// Codes of four bits in blocks with a scale.
    Four,
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
    /// Factor of a query.
    pub scale: f32,
    /// Weights that give, in this order, all queries, keys, values and gates.
    pub qkv: Vec<usize>,
    /// Whether there are gates: one for each number attended to, which is multiplied by its sigmoid.
    pub gates: bool,
    /// Added to queries and keys before anything else: `(heads + kv_heads) x head`, or nothing.
    pub qk_bias: Vec<f32>,
    /// Norms of each query and key, before they are turned.
    pub qk_norms: Option<[usize; 2]>,
    /// Weight behind attention.
    pub out: usize,
    /// Weights that give the gates, then the factors of the gates.
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
    /// A block; each of its runs has a separate cache.
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
    /// The steps of a token from its embedding to the state that the head reads.
    pub order: Vec<Op>,
    /// Weight that gives logits.
    pub head: usize,
    /// How finely activations enter products with codes.
    pub precision: Precision,
    /// How keys and values are kept.
    pub kept: Kind,
}

impl Program {
    /// Refuses an inconsistent program. After that, all numbers of weights, norms and blocks exist, and no size is
    /// zero. The outputs of a block's weights match its queries, keys, values and gates.
    pub(super) fn check(&self) -> Result<()> {
        if let Some([outputs, inputs]) = self.shapes.iter().find(|shape| shape.contains(&0)) {
            let got = format!("{outputs} x {inputs}");
            return Err(Error::shape("a weight of a program", "1 or more outputs and inputs", got));
        }
        self.blocks.iter().try_for_each(|block| self.check_block(block))?;
        self.order.iter().try_for_each(|&op| self.check_op(op))?;
        let [_, inputs] = self.shape(self.head)?;
        if inputs != self.width {
            return Err(Error::shape("inputs of the head", self.width, inputs));
        }
        Ok(())
    }

    fn check_block(&self, block: &Block) -> Result<()> {
        let Block { heads, kv_heads, head, .. } = *block;
        let whole = heads > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads);
        if !whole || head == 0 || !head.is_multiple_of(2) {
            let (what, allowed) = ("heads, key/value heads, width of a head", "1.., a divisor of it, even");
            return Err(Error::shape(what, allowed, format!("{heads}, {kv_heads}, {head}")));
        }
        let queries = dims::product("queries", heads, head)?;
        let keys = dims::product("keys and values", 2 * kv_heads, head)?;
        let gates = if block.gates { queries } else { 0 };
        let attended =
            dims::sum("queries, keys, values and gates", queries, dims::sum("gates", keys, gates)?)?;
        let outputs = self.checked_outputs(&block.qkv)?;
        if outputs != attended {
            return Err(Error::shape("outputs for queries, keys, values and gates", attended, outputs));
        }
        self.check_shape("the weight behind attention", block.out, [self.width, queries])?;
        let wide = self.checked_outputs(&block.gate_up)?;
        if !wide.is_multiple_of(2) {
            return Err(Error::shape("outputs for the gate and what it multiplies", "an even number", wide));
        }
        self.check_shape("the weight behind the gate", block.down, [self.width, wide / 2])?;
        if !block.qk_bias.is_empty() {
            dims::check_matrix("the bias of q and k", &block.qk_bias, heads + kv_heads, head)?;
        }
        block.qk_norms.into_iter().flatten().try_for_each(|i| self.check_norm(i, head))?;
        let norms = block.norms.iter().flat_map(|norms| [norms.input, norms.branch, norms.stream]);
        norms.flatten().try_for_each(|i| self.check_norm(i, self.width))
    }

    fn check_op(&self, op: Op) -> Result<()> {
        match op {
            Op::Block(i) if i >= self.blocks.len() => {
                Err(Error::shape("a block's number", self.blocks.len(), i))
            }
            Op::Norm(i) => self.check_norm(i, self.width),
            Op::Keep(i) | Op::Take(i) | Op::Add(i) if i >= KEPT => {
                Err(Error::shape("the number of a state kept", format!("0 to {}", KEPT - 1), i))
            }
            Op::Adapter(i) => {
                self.check_shape("the adapter", i, [self.width, dims::product("the adapter", 2, self.width)?])
            }
            _ => Ok(()),
        }
    }

    fn check_norm(&self, i: usize, len: usize) -> Result<()> {
        match self.norms.get(i) {
            Some(norm) if norm.weight.len() == len => Ok(()),
            Some(norm) => Err(Error::shape("a norm", len, norm.weight.len())),
            None => Err(Error::shape("a norm's number", self.norms.len(), i)),
        }
    }

    fn check_shape(&self, what: &'static str, i: usize, expected: [usize; 2]) -> Result<()> {
        let found = self.shape(i)?;
        if found != expected {
            return Err(Error::shape(what, format!("{expected:?}"), format!("{found:?}")));
        }
        Ok(())
    }

    fn shape(&self, i: usize) -> Result<[usize; 2]> {
        self.shapes.get(i).copied().ok_or_else(|| Error::shape("a weight's number", self.shapes.len(), i))
    }

    /// Outputs of some weights together, each of which takes the state.
    fn checked_outputs(&self, parts: &[usize]) -> Result<usize> {
        parts.iter().try_fold(0, |sum, &i| {
            let [outputs, _] = self.shape(i)?;
            self.check_shape("a block's weight", i, [outputs, self.width])?;
            dims::sum("a block's weights", sum, outputs)
        })
    }

    /// Outputs of some weights together, in a program that was checked.
    pub(super) fn outputs(&self, parts: &[usize]) -> usize {
        parts.iter().map(|&i| self.shapes[i][0]).sum()
    }
}
