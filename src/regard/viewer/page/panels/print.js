// A page that is printed is as large as on the screen: what is drawn keeps its shape, and its place.

/** @param {AbortSignal} ended */
export function printAsShown(ended) {
  const sheet = new CSSStyleSheet();
  const size = () => {
    const [width, height] = [`${innerWidth}px`, `${innerHeight}px`];
    sheet.replaceSync(
      `@page { size: ${width} ${height}; margin: 0 }
       @media print { .regard-body, .regard-body .regard-whole {
         width: ${width}; height: ${height} } }`,
    );
  };
  document.adoptedStyleSheets.push(sheet);
  addEventListener("beforeprint", size, { signal: ended });
  ended.addEventListener("abort", () => {
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((one) => one !== sheet);
  });
}
