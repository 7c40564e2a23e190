//! The peer whose memory is measured. Each allocation adds to a counter, so it must not be timed.
#[global_allocator]
static COUNTING: peers::count::Counting = peers::count::Counting;

fn main() {
    peers::run();
}
