use crate::model::test_support::tiny;

use super::*;
use crate::model::config::LayerKind;

#[test]
fn a_sharded_tied_model_opens_under_canonical_names() {
    let c = Checkpoint::open(&tiny("dense-tied")).unwrap();
    assert_eq!(c.config().layers, [LayerKind::Linear, LayerKind::Full]);
    assert_eq!(c.files().count(), 3);
    assert!(c.warnings().is_empty(), "{:?}", c.warnings());
    let embed = c.tensor("embed_tokens.weight").unwrap();
    assert_eq!((embed.dtype, embed.shape), (Dtype::BF16, &[320, 64][..]));
    assert_eq!(embed.original, "model.language_model.embed_tokens.weight");
    assert_eq!(embed.data.len(), 320 * 64 * 2);
    assert!(c.has("mtp.fc.weight") && !c.has("lm_head.weight"));
}
