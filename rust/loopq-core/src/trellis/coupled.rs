//! What the paths of a search made wrong so far, where rows are coupled.
//!
//! Paths share their past. Of 128 open paths 70 had their own state one row before, 20 five rows before, 5 sixteen and
//! 1.1 sixty-four rows before (measured on a language model's layers with 10 state bits). So errors are kept in blocks of
//! rows. Each path has its own part of the newest block. Complete blocks form a tree: an entry is what several paths have
//! in common. A block of one entry is common to all, and its errors join those that are decided.

use crate::grid::{value, Trellis};
use crate::memory::{collected, zeros};
use crate::simd::{dots, per_isa, Isa, Short};
use crate::trellis::row::{best, Row, SCRATCH};
use crate::Result;

/// Rows of a block.
const BLOCK: usize = size_of::<Short>() / size_of::<f32>();
/// Complete blocks in which paths may differ. Of those before, all take the errors of the best path.
const BLOCKS: usize = 16;
/// Rows of a new block after which entries without paths are dropped: most lose theirs at once.
const DROP: [usize; 3] = [1, 2, 4];
/// About as many paths stay open where rows are coupled.
const OPEN: usize = 1024;
/// Sample of costs for finding the cost that about so many lie below.
const SAMPLE: usize = 512;
/// No path leads to a node of this cost.
const INFINITE: u32 = f32::INFINITY.to_bits();

/// Errors of as many rows in each entry, and the entry of the block before that each goes on from.
#[derive(Default)]
struct Block {
    errors: Vec<Short>,
    parents: Vec<u32>,
    /// What the errors up to here amount to in the next row.
    sums: Vec<f32>,
}

/// State of each path where rows are coupled. Only the cheapest stay open: they alone have errors.
pub(super) struct Coupled {
    /// Nodes with open paths, all where there are few, and the place of each in the lists below.
    open: Vec<u32>,
    place: Vec<u32>,
    /// Whether every node has its own place.
    placed: bool,
    /// The newest block: errors of each open path, its row's in slot `n_rows % BLOCK`.
    newest: Block,
    moved: Block,
    states: Vec<u32>,
    errors: Vec<f32>,
    /// Complete blocks, the oldest first, and blocks to be used again.
    blocks: Vec<Block>,
    spare: Vec<Block>,
    /// Errors that all paths share.
    decided: Vec<f32>,
    /// Rows gone through.
    n_rows: usize,
    map: Vec<u32>,
}

/// A cost that about [`OPEN`] nodes are not above, judged by a part of them.
fn limit(keys: &[u32]) -> u32 {
    // Neighbours are alike: places are spread by the golden section.
    let place = |i: usize| (i as u32).wrapping_mul(0x9e37_79b1) as usize % keys.len();
    let mut sample: [u32; SAMPLE] = std::array::from_fn(|i| keys[place(i)]);
    let (_, &mut limit, _) = sample.select_nth_unstable(SAMPLE * OPEN / keys.len());
    limit.min(INFINITE - 1)
}

impl Block {
    fn new(nodes: usize) -> Result<Self> {
        Ok(Self {
            errors: collected(SCRATCH, (0..nodes).map(|_| Short([0.0; BLOCK])))?,
            parents: zeros(SCRATCH, nodes)?,
            sums: zeros(SCRATCH, nodes)?,
        })
    }

    /// Keeps the first entries.
    fn cut(&mut self, n: usize) {
        self.errors.truncate(n);
        self.parents.truncate(n);
    }

    /// Drops entries that no user goes on from. Returns whether there were any.
    fn keep(&mut self, users: &mut [u32], map: &mut Vec<u32>) -> bool {
        map.clear();
        map.resize(self.errors.len(), 0);
        for &user in users.iter() {
            map[user as usize] = 1;
        }
        let mut n = 0;
        for (at, to) in map.iter_mut().enumerate() {
            let used = *to as usize;
            *to = n as u32;
            self.errors[n] = self.errors[at];
            self.parents[n] = self.parents[at];
            n += used;
        }
        if n == map.len() {
            return false;
        }
        for user in users {
            *user = map[*user as usize];
        }
        self.cut(n);
        true
    }

    /// What the errors up to here amount to, where `before` are the sums of the block before.
    fn add_up(&mut self, isa: Isa, coupling: &[f32], before: &[f32]) {
        let coupling = Short(std::array::from_fn(|i| coupling.get(i).copied().unwrap_or(0.0)));
        self.sums.resize(self.errors.len(), 0.0);
        dots(isa, &self.errors, &coupling, &mut self.sums);
        for (sum, &parent) in self.sums.iter_mut().zip(&self.parents) {
            *sum += before[parent as usize];
        }
    }
}

impl Coupled {
    pub(super) fn new(nodes: usize, rows: usize) -> Result<Self> {
        let mut decided = zeros(SCRATCH, rows + BLOCK)?;
        decided.clear();
        Ok(Self {
            open: collected(SCRATCH, 0..nodes as u32)?,
            place: zeros(SCRATCH, nodes)?,
            placed: false,
            newest: Block::new(nodes)?,
            moved: Block::new(nodes)?,
            states: zeros(SCRATCH, nodes)?,
            errors: zeros(SCRATCH, nodes)?,
            blocks: Vec::new(),
            spare: Vec::new(),
            decided,
            n_rows: 0,
            map: zeros(SCRATCH, nodes)?,
        })
    }

    /// Begins with one path without errors for all nodes.
    pub(super) fn begin(&mut self) {
        self.place.fill(0);
        self.placed = false;
        self.newest.cut(0);
        self.newest.errors.push(Short([0.0; BLOCK]));
        self.newest.parents.push(0);
        self.spare.append(&mut self.blocks);
        self.decided.clear();
        self.n_rows = 0;
    }

    /// Takes the paths through a row: the cheapest stay open, and their errors go with them. Updates the target of each.
    pub(super) fn go(
        &mut self,
        isa: Isa,
        row: &Row,
        trellis: Trellis,
        history: &[u8],
        keys: &mut [u32],
        wanted: &mut [f32],
    ) -> Result<()> {
        self.close(keys, row.all);
        // Without open paths every cost is infinite, and nothing is wanted.
        if row.coupling.is_empty() || self.open.is_empty() {
            wanted.fill(row.next_root * row.wanted);
            return Ok(());
        }
        self.move_on(isa, row, trellis, history);
        self.n_rows += 1;
        let slot = self.n_rows % BLOCK;
        if slot == 0 || DROP.contains(&slot) {
            self.drop_unused();
        }
        if slot == 0 {
            self.complete(isa, keys)?;
        }
        self.want(isa, row, slot, wanted);
        Ok(())
    }

    /// Closes all paths but the cheapest, unless all shall stay open.
    fn close(&mut self, keys: &mut [u32], all: bool) {
        if keys.len() <= OPEN {
            return;
        }
        self.open.resize(keys.len(), 0);
        let (limit, mut n) = (if all { INFINITE - 1 } else { limit(keys) }, 0);
        for (node, key) in keys.iter_mut().enumerate() {
            self.open[n] = node as u32;
            let stays = *key <= limit;
            n += usize::from(stays);
            *key = if stays { *key } else { INFINITE };
        }
        self.open.truncate(n);
    }

    fn move_on(&mut self, isa: Isa, row: &Row, trellis: Trellis, history: &[u8]) {
        let (slot, bits, nodes) = (self.n_rows % BLOCK, trellis.bits(), trellis.low());
        let n = self.open.len();
        self.states.resize(n, 0);
        self.errors.resize(n, 0.0);
        if n == nodes {
            all_states(isa, history, nodes as u32, &mut self.states);
        } else {
            for (state, &node) in self.states.iter_mut().zip(&self.open) {
                *state = u32::from(history[node as usize]) * nodes as u32 + node;
            }
        }
        errors_of(isa, &self.states, row.scale, row.target, &mut self.errors);
        self.moved.errors.resize(n, Short([0.0; BLOCK]));
        self.moved.parents.resize(n, 0);
        let places = if self.placed { &[][..] } else { &self.place };
        carry(isa, &self.states, places, bits, slot, &self.errors, &self.newest, &mut self.moved);
        // Where all were open and are, nothing is placed anew.
        if n != nodes || !self.placed {
            for (to, &node) in self.open.iter().enumerate() {
                self.place[node as usize] = to as u32;
            }
        }
        self.placed = n == nodes;
        std::mem::swap(&mut self.newest, &mut self.moved);
    }

    /// Drops entries of complete blocks that no path goes on from.
    fn drop_unused(&mut self) {
        let mut users = &mut self.newest.parents;
        for block in self.blocks.iter_mut().rev() {
            if !block.keep(users, &mut self.map) {
                break;
            }
            users = &mut block.parents;
        }
        let single = self.blocks.iter().take_while(|block| block.errors.len() == 1).count();
        for block in self.blocks.drain(..single) {
            self.decided.extend_from_slice(&block.errors[0].0);
            self.spare.push(block);
        }
    }

    /// The newest block is complete: every path begins another.
    fn complete(&mut self, isa: Isa, keys: &[u32]) -> Result<()> {
        if self.blocks.len() == BLOCKS {
            let mut entry = self.newest.parents[self.place[best(isa, keys)] as usize];
            for block in self.blocks[1..].iter().rev() {
                entry = block.parents[entry as usize];
            }
            let oldest = self.blocks.remove(0);
            self.decided.extend_from_slice(&oldest.errors[entry as usize].0);
            self.blocks[0].parents.fill(0);
            self.spare.push(oldest);
        }
        let mut block = self.spare.pop().map_or_else(|| Block::new(self.place.len()), Ok)?;
        std::mem::swap(&mut block, &mut self.newest);
        self.newest.errors.clone_from(&block.errors);
        self.newest.parents.clear();
        self.newest.parents.extend(0..block.errors.len() as u32);
        self.blocks.push(block);
        Ok(())
    }

    /// Updates the target of every open path.
    fn want(&mut self, isa: Isa, row: &Row, slot: usize, wanted: &mut [f32]) {
        let (decided, mut coupling) = row.coupling.split_at(self.decided.len());
        let mut before = &[common(isa, decided, &self.decided)][..];
        for block in &mut self.blocks {
            block.add_up(isa, coupling, before);
            (before, coupling) = (&block.sums, &coupling[BLOCK..]);
        }
        self.newest.add_up(isa, &coupling[..slot], before);
        if self.open.len() == wanted.len() {
            return targets(isa, &self.newest.sums, row.wanted, row.next_root, wanted);
        }
        for (&node, sum) in self.open.iter().zip(&self.newest.sums) {
            wanted[node as usize] = row.next_root * (row.wanted - sum);
        }
    }
}

per_isa! {
    /// `first code * nodes + node`.
    fn all_states(codes: &[u8], nodes: u32, states: &mut [u32]) = all_states_body;
}

per_isa! {
    /// `scale * value - target`.
    fn errors_of(states: &[u32], scale: f32, target: f32, errors: &mut [f32]) = errors_of_body;
}

per_isa! {
    /// `root * (wanted - sum)`.
    fn targets(sums: &[f32], wanted: f32, root: f32, targets: &mut [f32]) = targets_body;
}

per_isa! {
    /// The inner product, of a whole number of blocks.
    fn common(a: &[f32], b: &[f32]) -> f32 = common_body;
}

per_isa! {
    /// Brings the errors of each path from the node before its state, and its new one. `places` are those of nodes, or
    /// empty where each node has its own.
    fn carry(
        states: &[u32],
        places: &[u32],
        bits: u32,
        slot: usize,
        errors: &[f32],
        from: &Block,
        to: &mut Block
    ) = carry_body;
}

#[inline(always)]
fn carry_body(
    states: &[u32],
    places: &[u32],
    bits: u32,
    slot: usize,
    errors: &[f32],
    from: &Block,
    to: &mut Block,
) {
    let to = to.errors.iter_mut().zip(&mut to.parents);
    for ((to, parent), (&state, &error)) in to.zip(states.iter().zip(errors)) {
        let node = (state >> bits) as usize;
        let place = if places.is_empty() { node } else { places[node] as usize };
        *to = from.errors[place];
        to.0[slot % BLOCK] = error;
        *parent = from.parents[place];
    }
}

#[inline(always)]
fn all_states_body(codes: &[u8], nodes: u32, states: &mut [u32]) {
    for (node, (state, &code)) in states.iter_mut().zip(codes).enumerate() {
        *state = u32::from(code) * nodes + node as u32;
    }
}

#[inline(always)]
fn errors_of_body(states: &[u32], scale: f32, target: f32, errors: &mut [f32]) {
    for (error, &state) in errors.iter_mut().zip(states) {
        *error = scale * value(state) - target;
    }
}

#[inline(always)]
fn targets_body(sums: &[f32], wanted: f32, root: f32, targets: &mut [f32]) {
    for (target, sum) in targets.iter_mut().zip(sums) {
        *target = root * (wanted - sum);
    }
}

#[inline(always)]
fn common_body(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; BLOCK];
    for (a, b) in a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}
