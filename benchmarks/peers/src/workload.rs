//! Reads a KVWL v1 file; benchmarks/workload.py defines the layout and writes the files.

pub struct Workload {
    pub n_ranks: usize,
    pub depth: usize,
    pub block_size: usize,
    pub rank: Vec<u32>,
    pub kind: Vec<u32>,
    pub parent: Vec<u64>,
    pub offset: Vec<usize>,
    pub local: Vec<u64>,
    pub sequence: Vec<u64>,
    pub queries: Vec<Vec<u64>>,
    /// Token ids of the first queries, one row per query; none in a workload from a trace.
    pub tokens: Vec<Vec<u32>>,
}

pub const STORED: u32 = 0;

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn u32s(&mut self, n: usize) -> Vec<u32> {
        let part = &self.bytes[self.at..self.at + 4 * n];
        self.at += (4 * n).next_multiple_of(8);
        part.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect()
    }
    fn u64s(&mut self, n: usize) -> Vec<u64> {
        let part = &self.bytes[self.at..self.at + 8 * n];
        self.at += 8 * n;
        part.chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect()
    }
    fn sizes(&mut self, n: usize) -> Vec<usize> {
        self.u64s(n).into_iter().map(|x| x as usize).collect()
    }
}

impl Workload {
    pub fn load(path: &str) -> Workload {
        let bytes = std::fs::read(path).expect("a KVWL file");
        assert_eq!(&bytes[..8], b"KVWL0001", "not a KVWL v1 file");
        let mut reader = Reader { bytes: &bytes, at: 8 };
        let head = reader.sizes(8);
        let [n_ranks, depth, block_size, n_events, n_blocks, n_queries, n_query_blocks, n_tokens] = head[..] else {
            unreachable!()
        };
        let rank = reader.u32s(n_events);
        let kind = reader.u32s(n_events);
        let parent = reader.u64s(n_events);
        let offset = reader.sizes(n_events + 1);
        let local = reader.u64s(n_blocks);
        let sequence = reader.u64s(n_blocks);
        let _class = reader.u32s(n_queries);
        let query_offset = reader.sizes(n_queries + 1);
        let query_local = reader.u64s(n_query_blocks);
        let _query_sequence = reader.u64s(n_query_blocks);
        let tokens = (0..n_tokens).map(|_| reader.u32s(depth * block_size)).collect();
        let queries = query_offset.windows(2).map(|w| query_local[w[0]..w[1]].to_vec()).collect();
        Workload { n_ranks, depth, block_size, rank, kind, parent, offset, local, sequence, queries, tokens }
    }
    pub fn n_events(&self) -> usize {
        self.rank.len()
    }
    pub fn blocks_of(&self, event: usize) -> std::ops::Range<usize> {
        self.offset[event]..self.offset[event + 1]
    }
    /// Index of the first removal, from which on a workload of evictions is timed.
    pub fn first_removal(&self) -> usize {
        self.kind.iter().position(|&kind| kind != STORED).unwrap_or(self.n_events())
    }
}
